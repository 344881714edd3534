//! The workers that were chosen for an attempt.

use std::sync::Arc;

use super::chosen::Split;
use crate::fleet::Worker;
use crate::fleet::kv_transfer::BootstrapInfo;
use crate::observe;
use crate::routing::Decision;

/// The workers that get a request.
#[derive(Debug)]
pub(in crate::relay) struct Choice {
    pub(in crate::relay) decision: Decision,
    /// The worker that answers.
    pub(in crate::relay) worker: Arc<Worker>,
    pub(in crate::relay) split: Split<Prefill>,
    pub(super) _trial: Option<Trial>,
}

/// The worker of the prefill leg.
#[derive(Debug)]
pub(in crate::relay) struct Prefill {
    pub(in crate::relay) decision: Decision,
    pub(in crate::relay) worker: Arc<Worker>,
    pub(super) _trial: Option<Trial>,
    /// What its bootstrap server reported, for connectors that need it.
    pub(in crate::relay) bootstrap_info: Option<Arc<BootstrapInfo>>,
}

/// The prefill leg of a disaggregated request.
pub(in crate::relay) struct PrefillLeg {
    pub(in crate::relay) worker: Arc<Worker>,
    /// The dp rank that it was pinned to.
    pub(in crate::relay) rank: Option<u32>,
    pub(in crate::relay) decision: Decision,
    /// The prompt's tokens and those that the prefill worker had cached, if the answer is the decode worker's.
    pub(in crate::relay) tokens: Option<(u64, u64)>,
}

impl Prefill {
    /// `tokens`: the prompt's, and those that the worker had cached.
    pub(in crate::relay) fn leg(&self, tokens: Option<(u64, u64)>) -> PrefillLeg {
        PrefillLeg {
            worker: self.worker.clone(),
            rank: self.worker.pinned_to(self.decision.rank),
            decision: self.decision,
            tokens,
        }
    }
}

/// The trial request of a worker's half-open circuit breaker. If it ends and says nothing about the worker (its client left, or
/// the request is to blame), the next request is the trial.
#[derive(Debug)]
pub(in crate::relay) struct Trial(pub(super) Arc<Worker>);

impl Drop for Trial {
    fn drop(&mut self) {
        self.0.breaker.release_trial(observe::now());
    }
}
