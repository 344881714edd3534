//! From a body's few fields to a worker: the model's group, the prompt's blocks, the decision.

use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use hyper::HeaderMap;
use smallvec::SmallVec;

use super::Error;
use super::Relay;
use super::held::Exact;
use super::held::Held;
use super::held::Prompt;
use super::model::ModelState;
use super::view::LiveView;
use crate::fleet::Group;
use crate::fleet::Snapshot;
use crate::fleet::Worker;
use crate::ids::WorkerId;
use crate::kv;
use crate::prompt::Api;
use crate::prompt::Peek;
use crate::routing;
use crate::routing::Decision;

/// How long a client should wait where no worker is healthy: about half of what it takes a worker to
/// be found healthy again.
pub(super) const NO_WORKER_RETRY_AFTER: Duration = Duration::from_secs(1);

pub(super) type Excluded = SmallVec<[WorkerId; 4]>;

/// A request with all that is needed to choose a worker for it, again if need be.
pub(super) struct Plan {
    pub(super) group: Arc<Group>,
    pub(super) model: Arc<ModelState>,
    pub(super) request: routing::Request,
    pub(super) prompt: Prompt,
    pub(super) is_stream: bool,
}

impl Relay {
    pub(super) fn plan(
        &self,
        api: Api,
        headers: &HeaderMap,
        peek: &Peek<'_>,
    ) -> Result<Plan, Error> {
        let snapshot = self.fleet.snapshot();
        let group = match &peek.model {
            Some(name) => snapshot.models.get(name.as_ref()),
            None => snapshot.only_model(),
        };
        let Some(group) = group else {
            return Err(no_group(&snapshot, peek.model.as_deref()));
        };
        let model = self.models.of(&group.model);
        let tokens = |bytes: u64| (bytes as f64 / model.bytes_per_token) as u32;
        let blocks = if api.generates() {
            let start = kv::block::start(&group.model, peek.cache_salt.as_deref());
            let blocks = peek.prompt.blocks.iter();
            kv::block::chain(
                start,
                blocks.map(|block| (block.hash, tokens(u64::from(block.bytes)))),
            )
        } else {
            Vec::new()
        };
        let salt = peek.cache_salt.as_deref();
        let exact = peek
            .token_ids
            .as_deref()
            .map(|ids| Exact::new(&self.forest, group, salt, ids));
        let prompt_tokens = match &peek.token_ids {
            Some(ids) => u32::try_from(ids.len()).unwrap_or(u32::MAX),
            // Rounding each block down must not make the prompt shorter than its blocks.
            None => {
                tokens(peek.prompt.bytes).max(blocks.last().map_or(0, |block| block.end_tokens))
            }
        };
        Ok(Plan {
            request: routing::Request {
                prompt_tokens,
                affinity: model.affinity(headers, peek),
                ticket: model.next_ticket(),
                seed: fastrand::u64(..),
            },
            is_stream: peek.is_stream,
            group: group.clone(),
            model,
            prompt: Prompt { blocks, exact },
        })
    }

    /// Takes the model's workers as they are now.
    pub(super) fn renew(&self, plan: &mut Plan) {
        if let Some(group) = self.fleet.snapshot().models.get(&plan.group.model) {
            plan.group = group.clone();
        }
    }

    pub(super) fn view<'a>(
        &'a self,
        plan: &'a Plan,
        now: Instant,
        excluded: &'a [WorkerId],
        holders_max: usize,
    ) -> LiveView<'a> {
        let held = Held::new(
            &plan.group,
            &self.predicted,
            &plan.prompt,
            holders_max,
            plan.request.seed,
        );
        LiveView::new(&plan.group, held, now, excluded)
    }

    /// A worker for a plan, but for `excluded`; with `may_repeat` one of those where there is no other.
    pub(super) fn choose(
        &self,
        plan: &Plan,
        now: Instant,
        excluded: &[WorkerId],
        may_repeat: bool,
    ) -> Option<(Decision, Arc<Worker>)> {
        let mut excluded: Excluded = excluded.into();
        let holders_max = plan.model.routing.holders as usize;
        loop {
            let decide = |excluded: &[WorkerId]| {
                routing::decide(
                    &plan.model.routing,
                    &plan.request,
                    &self.view(plan, now, excluded, holders_max),
                )
            };
            let decision =
                decide(&excluded).or_else(|| if may_repeat { decide(&[]) } else { None })?;
            let worker = &plan.group.workers[decision.place];
            // Of several requests that see a breaker ready to probe, one gets through.
            if worker.breaker.pass(now) {
                return Some((decision, worker.clone()));
            }
            excluded.push(worker.id);
        }
    }
}

/// Why a request has no workers to choose from.
fn no_group(fleet: &Snapshot, model: Option<&str>) -> Error {
    let known: Vec<String> = fleet.models.keys().map(|model| model.to_string()).collect();
    match model {
        // Nobody knows yet all that there is; a client should ask again, not give up.
        _ if known.is_empty() => {}
        Some(_) if fleet.is_being_learnt() => {}
        Some(model) => {
            return Error::UnknownModel {
                model: model.to_owned(),
                known,
            };
        }
        None => return Error::NoModel { known },
    }
    Error::NoWorker {
        model: model.unwrap_or_default().to_owned(),
        retry_after: NO_WORKER_RETRY_AFTER,
    }
}
