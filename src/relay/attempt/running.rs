//! What a running request counts for at its worker: load, blocks that will be cached soon, a tokenizer check.

use std::any::Any;
use std::pin::pin;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use crate::fleet::Worker;
use crate::fleet::in_flight::InFlight;
use crate::ids::{Block, WorkerId};
use crate::kv::tokenizer_check::PromptCheck;
use crate::kv::unconfirmed::UnconfirmedPrompt;
use crate::observe;
use crate::relay::plan::Plan;
use crate::relay::prompt::cached_prefix::Caches;
use crate::routing::{Decision, Expected};
use crate::traces::TrySpan;

/// Dropped, it takes back what counts for a running request only.
#[derive(Debug)]
pub(in crate::relay) struct Running {
    in_flight: InFlight,
    coming: SmallVec<[UnconfirmedPrompt; 1]>,
    check: Option<PromptCheck>,
    /// When the worker was chosen, and when its tokens are expected from then on.
    pub(in crate::relay) expected: Option<(Instant, Expected)>,
    /// At the worker that computes the prompt for another one, until the first token.
    pub(in crate::relay) prefill: Option<InFlight>,
    /// The span of the try whose answer has begun, if the request is traced.
    pub(in crate::relay) span: Option<Box<TrySpan>>,
    /// The prefill leg of a request whose two legs run at the same time.
    /// Its connection stays open, and is not read any more.
    pub(in crate::relay) prefill_leg: Option<Box<dyn Any + Send>>,
}

/// Counts the prompt at the worker that computes what `decision` says is not cached there.
pub(in crate::relay) fn count_prompt(
    plan: &Plan,
    worker: &Arc<Worker>,
    decision: &Decision,
) -> InFlight {
    let tokens = plan.request.prompt_tokens;
    let cached_tokens = tokens.saturating_sub(decision.new_tokens);
    InFlight::new(worker.clone(), tokens, cached_tokens)
}

impl Running {
    pub(in crate::relay) fn new(in_flight: InFlight) -> Self {
        Self {
            in_flight,
            coming: SmallVec::new(),
            check: None,
            expected: None,
            prefill: None,
            span: None,
            prefill_leg: None,
        }
    }

    /// At a worker that computes the plan's prompt from `now` on.
    pub(in crate::relay) fn computing(
        caches: &Caches,
        plan: &Plan,
        now: Instant,
        in_flight: InFlight,
    ) -> Self {
        let worker = in_flight.worker();
        Self {
            coming: plan.expect(caches, worker, in_flight.rank()),
            check: plan.check(&caches.tokenizer_check, now, worker),
            ..Self::new(in_flight)
        }
    }

    /// How long it took until `now`, divided by what was expected of it.
    pub(in crate::relay) fn ratio(
        &self,
        now: Instant,
        of: impl Fn(&Expected) -> f64,
    ) -> Option<f64> {
        let (chosen, expected) = self.expected.as_ref()?;
        let seen = now.saturating_duration_since(*chosen).as_secs_f64();
        Some(seen / of(expected)).filter(|ratio| ratio.is_finite())
    }

    pub(in crate::relay) fn span(&mut self) -> Option<&mut TrySpan> {
        self.span.as_deref_mut()
    }

    /// Another worker than the chosen one answers.
    pub(in crate::relay) fn move_to(&mut self, in_flight: InFlight) {
        self.in_flight = in_flight;
        self.coming.clear();
        self.check = None;
    }

    /// The engine refused the request, so it does not compute the prompt.
    pub(in crate::relay) fn on_refusal(&mut self) {
        self.coming.clear();
        self.check = None;
    }

    /// The answer broke off: the worker has nothing of the request any more.
    pub(in crate::relay) fn on_lost(&mut self) {
        self.on_refusal();
        self.in_flight.end();
        self.prefill_leg = None;
        self.prefill = None;
        self.span = None;
    }

    /// The engine has computed the prompt, and this is its first token.
    pub(in crate::relay) fn on_first_token(&mut self, now: Instant) {
        self.in_flight.on_prompt_computed(now);
        self.on_computed(now);
        if let Some(span) = &mut self.span {
            span.on_first_token(now);
        }
    }

    /// The answer is complete, and its last token came at `now`. `tokens`: those after the first one that was seen, or all.
    pub(in crate::relay) fn on_answered(&mut self, now: Instant, tokens: u64) {
        self.in_flight.on_answered(now, tokens);
    }

    /// The engine has computed the prompt, at any time before now.
    pub(in crate::relay) fn on_whole_answer(&mut self, now: Instant) {
        self.in_flight.on_first_token();
        self.on_computed(now);
    }

    fn on_computed(&mut self, now: Instant) {
        if let Some(mut prefill) = self.prefill.take() {
            prefill.on_first_token();
        }
        for coming in self.coming.drain(..) {
            coming.on_first_token(now);
        }
        if let Some(check) = self.check.take() {
            check.on_first_token();
        }
    }

    /// Waits for an answer whose first token is not seen, and counts the prompt as computed after a time.
    pub(in crate::relay) async fn prefilled_after<T>(
        &mut self,
        after: Duration,
        answer: impl Future<Output = T>,
    ) -> T {
        let mut answer = pin!(answer);
        let due = shared_wake_up(observe::now() + after);
        tokio::select! {
            biased;
            answer = &mut answer => return answer,
            () = tokio::time::sleep_until(due.into()) => self.assume_prefilled(),
        }
        answer.await
    }

    /// The prompt should be computed by now, by the worker that answers or by the one that computes it for that.
    fn assume_prefilled(&mut self) {
        self.in_flight.assume_prefilled();
        if let Some(prefill) = &mut self.prefill {
            prefill.assume_prefilled();
        }
    }

    /// The dp rank that the request is pinned to.
    pub(in crate::relay) fn rank(&self) -> Option<u32> {
        self.in_flight.rank()
    }

    pub(in crate::relay) fn worker(&self) -> &Arc<Worker> {
        self.in_flight.worker()
    }
}

/// The beginning of the grid on which prompts are assumed to be computed.
static GRID_START: LazyLock<Instant> = LazyLock::new(observe::now);
/// A timer that is due before all others of its I/O thread costs three system calls. Requests whose timers are due at the same
/// moment pay for one; no prompt's time is known that well.
const GRID: Duration = Duration::from_millis(5);

/// The first point of the grid at `due` or later.
fn shared_wake_up(due: Instant) -> Instant {
    let past = due.saturating_duration_since(*GRID_START).as_nanos() % GRID.as_nanos();
    let missing = (GRID.as_nanos() - past) % GRID.as_nanos();
    due + Duration::from_nanos(missing as u64)
}

/// Optimistic insert: the predicted cache, and those of the other replicas, have the prompt's blocks at the worker from
/// the moment of the decision. Taken back when dropped, unless the worker has started to answer. Of a worker whose KV
/// events are relied on nothing is predicted ([`Plan::is_predicted`]).
#[must_use = "dropped, it is taken back"]
pub(in crate::relay) struct OptimisticInsert<'a> {
    caches: &'a Caches,
    worker: WorkerId,
    blocks: &'a [Block],
    held_before: usize,
    /// The other replicas know of it.
    is_shared: bool,
}

impl<'a> OptimisticInsert<'a> {
    pub(in crate::relay) fn new(
        caches: &'a Caches,
        now: Instant,
        (worker, rank): (&Worker, Option<u32>),
        plan: &'a Plan,
    ) -> Self {
        let owner = worker.id.cache_owner(rank);
        let mut insert = Self {
            caches,
            worker: owner,
            blocks: &[],
            held_before: 0,
            is_shared: false,
        };
        let blocks = &plan.prompt.blocks[..];
        if blocks.is_empty() || !plan.is_predicted(caches, worker) {
            return insert;
        }
        let capacity_tokens = worker.cache_tokens_of(owner.rank());
        let recorded = caches.predicted.record(now, owner, capacity_tokens, blocks);
        if let Some(news) = recorded.news {
            insert.blocks = &blocks[..news.end];
            insert.held_before = recorded.cached_blocks;
            // What the worker's KV events report, every replica learns from them.
            insert.is_shared = !plan.is_reported_by(worker);
            if insert.is_shared {
                caches.routed.push(now, owner, blocks, news);
            }
        }
        insert
    }

    pub(in crate::relay) fn confirm(mut self) {
        self.held_before = self.blocks.len();
    }
}

impl Drop for OptimisticInsert<'_> {
    fn drop(&mut self) {
        if self.held_before == self.blocks.len() {
            return;
        }
        let (worker, blocks, first) = (self.worker, self.blocks, self.held_before);
        self.caches.predicted.retract(worker, blocks, first);
        if self.is_shared {
            self.caches
                .routed
                .retract(observe::now(), worker, blocks, first);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::registry::tests::worker;

    #[test]
    fn a_prompt_that_should_be_computed_counts_at_no_worker_as_queued() {
        let (answering, computing) = (worker("a"), worker("b"));
        let in_flight = InFlight::decoding(answering.clone(), 100);
        let mut running = Running::new(in_flight);
        running.prefill = Some(InFlight::new(computing.clone(), 100, 60));
        assert_eq!(computing.load.queued_tokens(), 40);
        running.assume_prefilled();
        assert_eq!(computing.load.queued_tokens(), 0);
        assert_eq!(computing.load.requests(), 1);
        assert_eq!(answering.load.queued_tokens(), 0);
        // It counts as computed once the answer comes.
        assert_eq!(computing.load.computed_tokens(), 0);
        running.on_whole_answer(observe::now());
        assert_eq!(computing.load.computed_tokens(), 40);
        assert_eq!(computing.load.requests(), 0);
    }

    #[test]
    fn prompts_that_are_computed_at_about_the_same_time_share_a_wake_up() {
        let at = |millis| *GRID_START + Duration::from_millis(millis);
        for (due, shared) in [(0, 0), (1, 5), (4, 5), (5, 5), (6, 10), (25, 25)] {
            assert_eq!(shared_wake_up(at(due)), at(shared), "{due}");
        }
        let due = at(5) + Duration::from_nanos(1);
        assert_eq!(shared_wake_up(due), at(10));
    }
}
