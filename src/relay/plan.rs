//! From a body's few fields to a worker: the model's group, the prompt's blocks, the decision.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::HeaderMap;
use smallvec::SmallVec;

use super::cached_prefix::CachedPrefixes;
use super::handoff::{Legs, NotSplit};
use super::model::ModelState;
use super::prompt_blocks::{Prompt, TokenBlocks};
use super::report::Report;
use super::tokens::Found;
use super::{Error, Relay, tell_tokens};
use crate::fleet::{Group, Snapshot, Worker};
use crate::ids::WorkerId;
use crate::kv::parity::{Check, Made, Parity};
use crate::kv::subscriber::Board;
use crate::kv::unconfirmed::{UnconfirmedBlocks, UnconfirmedPrompt};
use crate::prompt::{self, Api, Peek};
use crate::{kv, routing};

/// How long a client should wait where no worker is healthy: about half of what it takes a worker to
/// be found healthy again.
pub(super) const NO_WORKER_RETRY_AFTER: Duration = Duration::from_secs(1);

pub(super) type Excluded = SmallVec<[WorkerId; 4]>;

/// A request with all that is needed to choose a worker for it, again if need be.
pub(super) struct Plan {
    pub(super) api: Api,
    pub(super) group: Arc<Group>,
    pub(super) model: Arc<ModelState>,
    pub(super) request: routing::Request,
    pub(super) prompt: Prompt,
    pub(super) is_stream: bool,
    /// What engines are sent in the body's place, where they are told the prompt's ids.
    pub(super) body: Option<Bytes>,
    /// Where an engine is asked to tell again what it holds, where that may be asked.
    pub(super) report: Option<Report>,
    /// What two workers are sent instead, or why it must be one. None where requests are never split.
    pub(super) legs: Option<Result<Legs, NotSplit>>,
}

impl Plan {
    /// Counts the prompt's blocks as on their way to the worker that was chosen. Not to one of several
    /// ranks, since nobody knows to which of them it goes.
    pub(super) fn expect(
        &self,
        unconfirmed: &Arc<UnconfirmedBlocks>,
        worker: &Worker,
    ) -> SmallVec<[UnconfirmedPrompt; 1]> {
        let Some(exact) = &self.prompt.exact else {
            return SmallVec::new();
        };
        let place = self.group.place.get(&worker.id);
        if place.is_none_or(|place| self.group.event_ranks[*place] != 1) {
            return SmallVec::new();
        }
        let keys = exact.prefix_keys();
        keys.map(|keys| unconfirmed.insert(worker.id, keys))
            .collect()
    }
}

impl Plan {
    /// What is to be looked for at a worker that gets the prompt, if it tells what it holds.
    pub(super) fn check(
        &self,
        parity: &Arc<Parity>,
        now: Instant,
        worker: &Worker,
    ) -> Option<Check> {
        let exact = self.prompt.exact.as_ref()?;
        let ranks = self.event_ranks(worker);
        if ranks == 0 {
            return None;
        }
        let Some(prompt) = exact.checked(&self.group) else {
            parity.skip(&exact.subject(&self.group));
            return None;
        };
        Some(parity.check(now, prompt, worker.id, worker.name.clone(), ranks))
    }

    /// Whether a worker is to be asked what it holds of the prompt: it holds more than is known, and that
    /// may be of this one.
    pub(super) fn asks(&self, board: &Board, worker: &Worker) -> Option<&Report> {
        let report = self.report.as_ref()?;
        let exact = self.prompt.exact.as_ref()?;
        let asks = board.is_partial(worker.id)
            && !worker.refuses_reports.load(Relaxed)
            && exact.could_tell_more(worker.id, self.event_ranks(worker));
        asks.then_some(report)
    }

    fn event_ranks(&self, worker: &Worker) -> u32 {
        let place = self.group.place.get(&worker.id);
        place.map_or(0, |place| self.group.event_ranks[*place])
    }
}

impl Relay {
    pub(super) async fn plan(
        &self,
        api: Api,
        headers: &HeaderMap,
        peek: &mut Peek<'_>,
        body: &Bytes,
    ) -> Result<Plan, Error> {
        let group = self.group(peek.model.as_deref())?;
        let model = self.models.of(&group.model);
        let salt = peek.cache_salt.as_deref();
        let made = match api {
            _ if peek.token_ids.is_some() => Made::Given,
            Api::Completions => Made::Text,
            _ => Made::Rendered,
        };
        let found = match peek.token_ids.take() {
            Some(ids) => Some(Found::whole(ids)),
            None if api.generates() => self.tokens.of(api, &group, headers, body).await,
            None => None,
        };
        let measure = Measure::new(&peek.prompt, found.as_ref(), model.bytes_per_token);
        let blocks = if api.generates() {
            let start = kv::text_block::chain_root(&group.model, salt);
            let blocks = peek.prompt.blocks.iter();
            kv::text_block::chain(
                start,
                blocks.map(|block| (block.hash, measure.tokens(u64::from(block.bytes)))),
            )
        } else {
            Vec::new()
        };
        let exact = found.as_ref().map(|found| {
            let mut exact = TokenBlocks::new(&self.caches.indexes, &group, salt, &found.ids);
            exact.made = made;
            exact.ends_early = found.ends_early();
            exact.keep(&group, &self.caches.parity, &found.ids);
            exact
        });
        let may_tell = model.send_tokens && !peek.is_echo;
        let told = match &found {
            Some(found) if may_tell && !found.ends_early() => {
                tell_tokens::spliced(api, body, &found.ids)
            }
            _ => None,
        };
        let splits = self.prefill_decode.is_some();
        let legs = splits.then(|| Legs::of(api, told.as_ref().unwrap_or(body)));
        // Rounding each block down must not make the prompt shorter than its blocks.
        let in_blocks = blocks.last().map_or(0, |block| block.end_tokens);
        Ok(Plan {
            api,
            request: routing::Request {
                prompt_tokens: measure.prompt_tokens.max(in_blocks),
                affinity: model.affinity(headers, peek),
                ticket: model.next_ticket(),
                seed: fastrand::u64(..),
            },
            is_stream: peek.is_stream,
            report: None,
            group,
            model,
            prompt: Prompt { blocks, exact },
            body: told,
            legs,
        })
    }

    /// How many tokens a request's prompt has, where the router makes or knows them itself and nothing in it
    /// is unknown.
    pub async fn count_tokens(
        &self,
        api: Api,
        headers: &HeaderMap,
        body: &Bytes,
        model: Option<&str>,
    ) -> Result<Option<usize>, Error> {
        let group = self.group(model)?;
        let found = self.tokens.of(api, &group, headers, body).await;
        Ok(found
            .filter(|found| !found.ends_early())
            .map(|found| found.ids.len()))
    }

    fn group(&self, model: Option<&str>) -> Result<Arc<Group>, Error> {
        let snapshot = self.fleet.snapshot();
        let group = match model {
            Some(name) => snapshot.models.get(name),
            None => snapshot.only_model(),
        };
        group.cloned().ok_or_else(|| no_group(&snapshot, model))
    }

    /// Takes the model's workers as they are now.
    pub(super) fn renew(&self, plan: &mut Plan) {
        if let Some(group) = self.fleet.snapshot().models.get(&plan.group.model) {
            plan.group = group.clone();
        }
    }

    /// What workers hold of a plan's prompt.
    pub(super) fn held<'a>(
        &'a self,
        plan: &'a Plan,
        now: Instant,
        holders_max: usize,
    ) -> CachedPrefixes<'a> {
        CachedPrefixes::new(
            &plan.group,
            &self.caches,
            &plan.prompt,
            &plan.model.routing.tier_credit,
            now,
            holders_max,
            plan.request.seed,
        )
    }
}

/// How a prompt's bytes count as tokens.
struct Measure {
    prompt_tokens: u32,
    tokens_per_byte: f64,
}

impl Measure {
    fn new(prompt: &prompt::Prompt, found: Option<&Found>, bytes_per_token: f64) -> Self {
        let of_bytes = |bytes: u64| bytes as f64 / bytes_per_token;
        let tokens = match found {
            // What comes after an image is counted as where nothing is known, the image included.
            Some(found) if found.ends_early() => of_bytes(prompt.bytes).max(found.ids.len() as f64),
            Some(found) => found.ids.len() as f64,
            None => of_bytes(prompt.bytes),
        };
        Self {
            prompt_tokens: tokens as u32,
            tokens_per_byte: tokens / prompt.bytes.max(1) as f64,
        }
    }

    fn tokens(&self, bytes: u64) -> u32 {
        (bytes as f64 * self.tokens_per_byte) as u32
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
