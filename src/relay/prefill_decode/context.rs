//! What the two legs of one disaggregated attempt share.

use std::time::Instant;

use super::disaggregation::Disaggregation;
use super::metrics::ModelMetrics;
use super::pinned_blocks::PinnedTransfer;
use crate::relay::choice::{Choice, Prefill};
use crate::relay::core::Relay;
use crate::relay::failure::retries::Attempts;
use crate::relay::job::Job;
use crate::relay::plan::Plan;

#[derive(Clone, Copy)]
pub(super) struct LegContext<'a> {
    pub(super) relay: &'a Relay,
    pub(super) settings: &'a Disaggregation,
    pub(super) metrics: &'a ModelMetrics,
    pub(super) job: &'a Job<'a>,
    pub(super) plan: &'a Plan,
    pub(super) choice: &'a Choice,
    pub(super) prefill: &'a Prefill,
    pub(super) attempts: &'a Attempts,
    pub(super) deadline: Instant,
}

impl LegContext<'_> {
    /// The dp rank that the prefill leg is pinned to.
    pub(super) fn prefill_rank(&self) -> Option<u32> {
        self.prefill.worker.pinned_to(self.prefill.decision.rank)
    }

    /// The dp rank that the decode leg is pinned to.
    pub(super) fn decode_rank(&self) -> Option<u32> {
        self.choice.worker.pinned_to(self.choice.decision.rank)
    }

    /// True if the engine process that computed the prompt is known to be gone, and its KV blocks with it.
    pub(super) fn is_prefill_gone(&self) -> bool {
        let bootstrap_info = &self.prefill.bootstrap_info;
        bootstrap_info.is_some()
            && *bootstrap_info != self.prefill.worker.bootstrap_info.load_full()
    }
}

/// KV blocks that the decode worker has not fetched yet. Dropped, they are never fetched, and they stay pinned
/// until the engine's lease ends.
pub(super) struct PendingTransfer<'a> {
    pub(super) metrics: &'a ModelMetrics,
    pub(super) pinned: Option<PinnedTransfer>,
}

impl PendingTransfer<'_> {
    /// The blocks were fetched, or the engine got the order to free them.
    pub(super) fn release(mut self) {
        if let Some(pinned) = self.pinned.take() {
            pinned.release();
        }
    }

    /// The blocks could not be fetched, and stay pinned.
    pub(super) fn fail(mut self) {
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
