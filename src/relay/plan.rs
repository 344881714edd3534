//! The plan of a request: its model's workers, its prompt as blocks and tokens, what engines are sent.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bytes::Bytes;
use smallvec::SmallVec;

use super::continuation::{self, Reader, Refusal, Resume};
use super::job::{Error, Job};
use super::kv_transfer::{Legs, SingleWorkerReason};
use super::model::ModelState;
use super::prompt::cached_prefix::Caches;
use super::prompt::prompt_blocks::Prompt;
use crate::fleet::{Group, PinnedApi, Worker};
use crate::ids::WorkerId;
use crate::kv::tokenizer_check::{PromptCheck, TokenizerCheck};
use crate::kv::unconfirmed::UnconfirmedPrompt;
use crate::prompt::Api;
use crate::routing;

/// A request with all that a decision needs, for the first attempt and for retries.
pub(super) struct Plan {
    pub(super) api: Api,
    pub(super) group: Arc<Group>,
    pub(super) model: Arc<ModelState>,
    pub(super) request: routing::Request,
    pub(super) prompt: Prompt,
    /// Tokens of the prompt and of the answer that it asks for.
    pub(super) context_tokens: u32,
    pub(super) is_stream: bool,
    /// How long the request has waited for a worker with room.
    pub(super) queued: Duration,
    /// How engines may be asked for a dp rank, if they may.
    pub(super) pinned: Option<PinnedApi>,
    /// The worker that may have refused this request's decode leg for its rank. Then it is pinned to none.
    pub(super) rank_refused_by: Option<WorkerId>,
    /// The client's body with the prompt's token ids, if engines are sent them.
    pub(super) body: Option<Bytes>,
    /// Whether the stream may go on on another worker, if that is configured.
    pub(super) continuation: Option<Box<Result<continuation::Request, Refusal>>>,
    /// Reads the rest of a stream that another process began.
    pub(super) resumed: Option<Box<Reader>>,
    /// The prefill and decode legs, or why the request must run on one worker. `None` if requests are not
    /// disaggregated.
    pub(super) legs: Option<Result<Legs, SingleWorkerReason>>,
}

impl Plan {
    /// To change it. A plan is shared only while its request waits for room.
    pub(super) fn own(plan: &mut Arc<Self>) -> &mut Self {
        Arc::get_mut(plan).expect("whoever released the request has dropped its part")
    }

    /// Records here and at the other replicas that the prompt's blocks will be cached at the chosen worker or dp rank. Not
    /// for a worker with several ranks and a request that is pinned to none: it may go to any of them.
    pub(super) fn expect(
        &self,
        caches: &Caches,
        worker: &Worker,
        rank: Option<u32>,
    ) -> SmallVec<[UnconfirmedPrompt; 1]> {
        let Some(exact) = &self.prompt.exact else {
            return SmallVec::new();
        };
        let index = self.group.index_of(worker.id);
        let is_known = |index| rank.is_some() || self.group.event_ranks(index) == 1;
        if !index.is_some_and(is_known) {
            return SmallVec::new();
        }
        let owner = worker.id.cache_owner(rank);
        let expect = |keys| {
            caches.routed.push_unconfirmed(owner, keys);
            caches.unconfirmed.insert(owner, keys)
        };
        exact.prefix_keys().map(expect).collect()
    }

    /// The tokenizer check of a worker that gets the prompt and reports KV events.
    pub(super) fn check(
        &self,
        tokenizer_check: &Arc<TokenizerCheck>,
        now: Instant,
        worker: &Worker,
    ) -> Option<PromptCheck> {
        let exact = self.prompt.exact.as_ref()?;
        let ranks = self.event_ranks(worker);
        if ranks == 0 {
            return None;
        }
        let Some(prompt) = exact.checked(&self.group) else {
            tokenizer_check.skip(&exact.subject(&self.group));
            return None;
        };
        Some(tokenizer_check.start_check(now, prompt, worker.id, worker.name.clone(), ranks))
    }

    /// The body that asks a worker for token ids, so that the stream may go on on another one.
    pub(super) fn asks_token_ids(&self, worker: &Worker) -> Option<&Bytes> {
        let asked = token_ids_asked(&self.continuation)?;
        (!self.refuses_token_ids(worker).load(Relaxed)).then_some(asked)
    }

    /// Whether the worker's engine refuses streams like the request's for token ids.
    pub(super) fn refuses_token_ids<'a>(&self, worker: &'a Worker) -> &'a AtomicBool {
        if self.api == Api::Chat {
            &worker.refuses_chat_token_ids
        } else {
            &worker.refuses_completion_token_ids
        }
    }

    /// Whether the worker's KV events report this prompt's blocks.
    pub(super) fn is_reported_by(&self, worker: &Worker) -> bool {
        self.prompt.exact.is_some() && self.event_ranks(worker) > 0
    }

    /// Whether the prompt is recorded as predicted at a worker. Not if the worker's KV events are relied on and the tokens
    /// of such a prompt are always known in time: then only the events are asked.
    pub(super) fn is_predicted(&self, caches: &Caches, worker: &Worker) -> bool {
        let ranks = self.event_ranks(worker);
        let Some(exact) = self.prompt.exact.as_ref().filter(|_| ranks > 0) else {
            return true;
        };
        // Asked of the worker itself: before its events are followed it is not among those that do not report.
        let reports = || caches.board.snapshot().reports(worker.id, ranks);
        let check = &caches.tokenizer_check;
        let is_trusted =
            || !check.has_mismatches() || check.trusts(&exact.subject(&self.group), worker.id);
        exact.ends_early || exact.may_be_late || !reports() || !is_trusted()
    }

    /// Has the worker go on with what another process began, if the request is for that. Otherwise it would begin again.
    pub(super) fn go_on(&mut self, job: &Job<'_>) -> Result<(), Error> {
        let Some(resume) = job.resume else {
            return Ok(());
        };
        self.go_on_after(resume)
            .map_err(|refusal| Error::NotContinued {
                reason: refusal.as_str(),
            })
    }

    fn go_on_after(&mut self, resume: &Resume) -> Result<(), Refusal> {
        if !resume.is_of(&self.group.model) {
            return Err(Refusal::OtherModel);
        }
        let settings = self.model.stream_continuation.ok_or(Refusal::Api)?;
        let request = self.continuation.take().ok_or(Refusal::Api)?;
        let (reader, body) = Reader::resumed(settings, (*request)?, resume)?;
        let tokens = &mut self.request.prompt_tokens;
        *tokens = tokens.saturating_add(reader.answer_tokens());
        self.body = Some(body);
        self.resumed = Some(Box::new(reader));
        Ok(())
    }

    fn event_ranks(&self, worker: &Worker) -> u32 {
        let index = self.group.index_of(worker.id);
        index.map_or(0, |index| self.group.event_ranks(index))
    }
}

pub(super) fn token_ids_asked(
    continuation: &Option<Box<Result<continuation::Request, Refusal>>>,
) -> Option<&Bytes> {
    let request = continuation.as_deref()?.as_ref().ok()?;
    Some(&request.body)
}
