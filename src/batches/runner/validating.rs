//! Checks the input of a batch, and cuts it into shards.

use std::collections::BTreeSet;

use tokio::task::{JoinSet, yield_now};
use tracing::info;

use super::assembling::write_failed;
use super::work_context::{Halt, WorkContext};
use crate::batches::batch::BatchRecord;
use crate::batches::line::LineError;
use crate::batches::metrics::WorkOutcome;
use crate::batches::paths;
use crate::batches::queued_tokens;
use crate::batches::shards;
use crate::batches::storage::StorageError;
use crate::batches::validation::{MAX_MODELS, MODEL_PARAM, Plan, Validator};

/// Bytes that are checked at a time: less than a millisecond, after which requests on this thread have their turn.
const PIECE_BYTES: usize = 128 << 10;

/// What was found, or what is wrong.
type Found = Result<Plan, Vec<LineError>>;

/// What this replica refuses of a file. Other replicas may have another configuration.
#[derive(Default)]
struct Refused {
    /// Not all models if they are many.
    models: BTreeSet<String>,
    /// The codes of the errors of their lines, of which there are few.
    codes: BTreeSet<String>,
}

impl Refused {
    fn on_refusal(&mut self, model: &str, code: &str) {
        if self.models.len() < MAX_MODELS {
            self.models.insert(model.to_owned());
        }
        if !self.codes.contains(code) {
            self.codes.insert(code.to_owned());
        }
    }

    /// True if another replica may accept the line of this error. One that has no proper name of a model fails whoever
    /// checks it.
    fn has_led_to(&self, error: &LineError) -> bool {
        error.param.as_deref() == Some(MODEL_PARAM) && self.codes.contains(&error.code)
    }
}

pub(super) async fn run(work: &WorkContext) -> WorkOutcome {
    let Some(record) = work.own_record().await else {
        return WorkOutcome::Lost;
    };
    let checked = async {
        let found = check(work, &record).await?;
        let errors = found.as_ref().err();
        let error = errors.and_then(|errors| errors.first());
        let results = write_failed(work, &record, error).await?;
        Ok::<_, Halt>((found, results))
    };
    let (found, results) = match work.unless_stopped(checked).await {
        Ok(checked) => checked,
        Err(halt) => return work.on_halt(halt).await,
    };
    let owner = work.batches.owner;
    let written = work.write_end(|record, now_ms| {
        let is_ended = record.end_validation(owner, found.clone(), now_ms);
        if is_ended {
            record.output_file_id.clone_from(&results);
        }
        is_ended
    });
    let Some(record) = written.await else {
        return WorkOutcome::Lost;
    };
    info!(
        batch = record.id,
        tenant = record.tenant_name,
        status = record.status.as_str(),
        lines = record.counts.total,
        shards = record.shard_count,
        errors = record.errors.len(),
        "batch validated"
    );
    if record.status.is_terminal() {
        work.batches.on_ended(&record);
        work.batches.settle_end(work.key(), &record).await;
    }
    WorkOutcome::Done
}

async fn check(work: &WorkContext, record: &BatchRecord) -> Result<Found, Halt> {
    let _room = work.batches.memory.whole_file().await;
    let mut refused = Refused::default();
    let validated = match paths::input(work.key().tenant, record) {
        Some(path) => validate(work, record, &path, &mut refused).await,
        None => Err(StorageError::NotFound),
    };
    let plan = match validated {
        Ok(Ok(plan)) => plan,
        Ok(Err(errors)) => {
            // With any other error the batch fails whoever checks it.
            if errors.iter().all(|error| refused.has_led_to(error)) {
                leave_refusal(work, record)?;
            }
            return Ok(Err(errors));
        }
        Err(StorageError::NotFound) => {
            work.check_storage().await?;
            let message = "The input file of this batch does not exist any more.";
            return Ok(Err(vec![LineError::new("file_not_found", message, None)]));
        }
        Err(error) => return Err(error.into()),
    };
    if let Some(max) = work.sender.tokens_queued_max(&record.tenant_name) {
        let used = work.batches.queued_tokens(work.key()).await;
        let used = used.map_err(|error| StorageError::Failed(error.to_string()))?;
        if let Some(error) = queued_tokens::refusal(max, used, plan.tokens) {
            return Ok(Err(vec![error]));
        }
    }
    let list = shards::to_json(&plan.shards);
    let storage = &work.batches.storage;
    storage.put(&paths::shards(&record.id), list).await?;
    work.check_storage().await?;
    Ok(Ok(plan))
}

/// Leaves a batch to others of which a model was refused here, unless the refusal counts.
fn leave_refusal(work: &WorkContext, record: &BatchRecord) -> Result<(), Halt> {
    let (batches, now_ms) = (&work.batches, work.batches.now_ms());
    let Some(until_ms) = record.refusal_waits_until(batches.owner, now_ms) else {
        return Ok(());
    };
    batches.works.on_refusal(now_ms, work.key(), until_ms);
    info!(
        batch = record.id,
        tenant = record.tenant_name,
        "this replica refuses a model of a batch that another one has accepted; its validation is left to others"
    );
    Err(Halt::LeftToOthers)
}

/// Checks the input, and once more if the engines turn out to serve a model by now that they were not known to serve.
/// `refused` is as in [`validate_once`], of the last check.
async fn validate(
    work: &WorkContext,
    record: &BatchRecord,
    path: &str,
    refused: &mut Refused,
) -> Result<Found, StorageError> {
    let found = validate_once(work, record, path, refused).await?;
    if !look_up(work, &record.tenant_name, &refused.models).await {
        return Ok(found);
    }
    *refused = Refused::default();
    validate_once(work, record, path, refused).await
}

/// Has the engines asked for models, all in the same round. True if one of them was found.
async fn look_up(work: &WorkContext, tenant: &str, models: &BTreeSet<String>) -> bool {
    // Dropped, it gives the look-ups up.
    let mut asked = JoinSet::new();
    for name in models {
        let (sender, tenant, model) = (work.sender.clone(), tenant.to_owned(), name.clone());
        asked.spawn(async move { sender.look_up(&tenant, &model).await });
    }
    let mut is_any_found = false;
    while let Some(found) = asked.join_next().await {
        is_any_found |= found.unwrap_or(false);
    }
    is_any_found
}

/// `refused`: gets what was refused.
async fn validate_once(
    work: &WorkContext,
    record: &BatchRecord,
    path: &str,
    refused: &mut Refused,
) -> Result<Found, StorageError> {
    let mut reader = work.batches.storage.read(path, None).await?;
    let max_lines = work.batches.settings.max_lines;
    let (endpoint, tenant) = (record.endpoint, record.tenant_name.as_str());
    let refusal = |model: &str| {
        let refusal = work.sender.refusal(tenant, model, endpoint);
        if let Some((code, _)) = &refusal {
            refused.on_refusal(model, code);
        }
        refusal
    };
    let mut validator = Validator::new(endpoint, record.flavor, max_lines, refusal);
    while let Some(piece) = reader.next().await? {
        for chunk in piece.chunks(PIECE_BYTES) {
            validator.push(chunk);
            yield_now().await;
        }
        if validator.is_decided() {
            break;
        }
    }
    Ok(validator.finish())
}
