//! What the two legs of one disaggregated attempt share.

use std::fmt::Display;
use std::time::Instant;

use tracing::debug;

use super::outcome::FailedAttempt;
use super::running::Running;
use crate::fleet::in_flight::InFlight;
use crate::relay::choose::chosen::{Choice, Prefill};
use crate::relay::core::Relay;
use crate::relay::course::Course;
use crate::relay::failure::failure_owner::FailureOwner;
use crate::relay::failure::fault::Fault;
use crate::relay::failure::types::{Failure, Stage};
use crate::relay::job::Job;
use crate::relay::plan::Plan;
use crate::relay::prefill_decode::{Disaggregation, ModelMetrics, PinnedTransfer};
use crate::relay::traced;
use crate::traces::{Leg, TrySpan};

#[derive(Clone, Copy)]
pub(in crate::relay) struct LegContext<'a> {
    pub(in crate::relay) relay: &'a Relay,
    pub(in crate::relay) settings: &'a Disaggregation,
    pub(in crate::relay) metrics: &'a ModelMetrics,
    pub(in crate::relay) job: &'a Job<'a>,
    pub(in crate::relay) plan: &'a Plan,
    pub(in crate::relay) choice: &'a Choice,
    pub(in crate::relay) prefill: &'a Prefill,
    pub(in crate::relay) course: &'a Course,
}

impl LegContext<'_> {
    /// When the legs that begin now time out.
    pub(in crate::relay) fn attempt_deadline(&self, now: Instant) -> Instant {
        let limit = self.relay.attempt_deadline(self.plan, now);
        limit.min(self.course.deadline())
    }

    /// The attempt begins: it counts at the decode worker at once.
    pub(in crate::relay) fn begin(&self, now: Instant, prefill_rank: Option<u32>) -> Running {
        let (worker, prefill) = (&self.choice.worker, self.prefill);
        let tokens = self.plan.request.prompt_tokens;
        debug!(
            id = %self.job.context.id,
            worker = %worker.name,
            prefill = %prefill.worker.name,
            prefill_rank,
            rank = self.decode_rank(),
            cached_tokens = prefill.decision.cached_tokens,
            prompt_tokens = tokens,
            "workers chosen for a prefill and a decode leg"
        );
        let in_flight = InFlight::decoding(worker.clone(), tokens).at_rank(self.decode_rank());
        let mut running = Running::new(in_flight);
        running.expected = Some((now, self.choice.decision.expected));
        running
    }

    /// The span of one leg, if the request is traced.
    pub(in crate::relay) fn begin_try(
        &self,
        now: Instant,
        leg: Leg,
        rank: Option<u32>,
    ) -> Option<Box<TrySpan>> {
        let chosen = match leg {
            Leg::Prefill => (&self.prefill.worker, &self.prefill.decision),
            Leg::Decode => (&self.choice.worker, &self.choice.decision),
        };
        let count = self.course.count;
        traced::begin_try(self.job, self.plan, now, chosen, rank, Some(leg), count)
    }

    /// A prefill leg after which there is nothing to transfer.
    pub(in crate::relay) fn no_prefill(
        &self,
        owner: FailureOwner,
        why: &dyn Display,
    ) -> FailedAttempt {
        let fault = Fault::new(Stage::Prefill, Failure::KvTransfer, owner);
        FailedAttempt::new(fault, format!("{}: {why}", self.prefill.worker.name))
    }

    pub(in crate::relay) fn prefill_rank(&self) -> Option<u32> {
        self.prefill.worker.pinned_to(self.prefill.decision.rank)
    }

    pub(in crate::relay) fn decode_rank(&self) -> Option<u32> {
        self.choice.worker.pinned_to(self.choice.decision.rank)
    }

    /// True if the engine process that computed the prompt is known to be gone, and its KV blocks with it.
    pub(in crate::relay) fn is_prefill_gone(&self) -> bool {
        let bootstrap_info = &self.prefill.bootstrap_info;
        bootstrap_info.is_some()
            && *bootstrap_info != self.prefill.worker.bootstrap_info.load_full()
    }
}

/// KV blocks that the decode worker has not fetched yet. Dropped, they are never fetched, and they stay pinned
/// until the engine's lease ends.
pub(in crate::relay) struct PendingTransfer<'a> {
    pub(in crate::relay) metrics: &'a ModelMetrics,
    pub(in crate::relay) pinned: Option<PinnedTransfer>,
}

impl PendingTransfer<'_> {
    /// The blocks were fetched, or the engine got the order to free them.
    pub(in crate::relay) fn release(mut self) {
        if let Some(pinned) = self.pinned.take() {
            pinned.release();
        }
    }

    /// The blocks could not be fetched, and stay pinned.
    pub(in crate::relay) fn fail(mut self) {
        self.pinned = None;
        self.metrics.count_transfer("failed");
    }
}

impl Drop for PendingTransfer<'_> {
    fn drop(&mut self) {
        if self.pinned.is_some() {
            self.metrics.count_transfer("abandoned");
        }
    }
}
