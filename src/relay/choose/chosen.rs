//! What was chosen for a request, and what that promises its workers.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use smallvec::{SmallVec, smallvec};

use crate::fleet::kv_transfer::BootstrapInfo;
use crate::fleet::load::LoadShare;
use crate::fleet::{Group, Worker};
use crate::ids::WorkerId;
use crate::observe;
use crate::relay::kv_transfer::SingleWorkerReason;
use crate::routing::Decision;
use crate::routing::pair::LocalReason;

/// The decisions for the decode and the prefill worker, with indices into the group.
pub(in crate::relay) type Chosen = (Decision, Split<Decision>);

/// Whether a request has a prefill leg of its own.
#[derive(Clone, Copy, Debug)]
pub(in crate::relay) enum Split<P> {
    /// Disaggregation is not configured.
    Off,
    /// The worker that answers computes the prompt, too.
    Whole(NotDisaggregated),
    /// Another worker computes the prompt.
    Pair(P),
}

impl<P> Split<P> {
    /// What is known of the prefill leg.
    pub(in crate::relay) fn prefill(&self) -> Option<&P> {
        match self {
            Self::Pair(prefill) => Some(prefill),
            Self::Whole(_) | Self::Off => None,
        }
    }

    /// Why there is no prefill leg, where there could be one.
    pub(in crate::relay) fn why_whole(&self) -> Option<NotDisaggregated> {
        match self {
            Self::Whole(reason) => Some(*reason),
            Self::Pair(_) | Self::Off => None,
        }
    }

    pub(in crate::relay) fn as_ref(&self) -> Split<&P> {
        match self {
            Self::Pair(prefill) => Split::Pair(prefill),
            Self::Whole(reason) => Split::Whole(*reason),
            Self::Off => Split::Off,
        }
    }

    pub(in crate::relay) fn map<Q>(self, of_pair: impl FnOnce(P) -> Q) -> Split<Q> {
        match self {
            Self::Pair(prefill) => Split::Pair(of_pair(prefill)),
            Self::Whole(reason) => Split::Whole(reason),
            Self::Off => Split::Off,
        }
    }
}

/// The decision for the worker that computes the prompt.
pub(in crate::relay) fn computes((decode, split): &Chosen) -> &Decision {
    split.prefill().unwrap_or(decode)
}

/// When the first token is expected, in seconds from the choice. That of a pair's decode worker is behind the prefill leg.
pub(in crate::relay) fn first_token((decode, _): &Chosen) -> f64 {
    decode.expected.first_token
}

/// What a choice for a prompt of so many tokens promises its workers; first the one that computes it.
pub(in crate::relay) fn promises(
    prompt_tokens: u32,
    group: &Group,
    chosen: &Chosen,
) -> SmallVec<[(WorkerId, LoadShare); 2]> {
    let promise = |decision: &Decision, queued_tokens: u32| {
        let worker = group.worker(decision.index).id;
        let promise = LoadShare::of_request(prompt_tokens, queued_tokens);
        (worker.cache_owner(decision.rank), promise)
    };
    let (decode, split) = chosen;
    match split {
        Split::Pair(prefill) => smallvec![promise(prefill, prefill.new_tokens), promise(decode, 0)],
        Split::Whole(_) | Split::Off => smallvec![promise(decode, decode.new_tokens)],
    }
}

/// Why a request has no prefill leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::relay) enum NotDisaggregated {
    /// Because of the workers, as they are now.
    Local(LocalReason),
    /// Because of the request itself.
    Request(SingleWorkerReason),
    /// Its prefill legs or KV transfers have failed.
    Failed,
}

impl NotDisaggregated {
    pub(in crate::relay) fn as_str(self) -> &'static str {
        match self {
            NotDisaggregated::Local(reason) => reason.as_str(),
            NotDisaggregated::Request(reason) => reason.as_str(),
            NotDisaggregated::Failed => "prefill_failed",
        }
    }

    /// True if the request would have a prefill leg if a prefill worker were there for it.
    pub(in crate::relay) fn is_lack_of_prefill(self) -> bool {
        match self {
            NotDisaggregated::Local(reason) => reason.is_lack_of_prefill(),
            NotDisaggregated::Failed => true,
            NotDisaggregated::Request(_) => false,
        }
    }
}

/// The workers that get a request.
#[derive(Debug)]
pub(in crate::relay) struct Choice {
    pub(in crate::relay) decision: Decision,
    /// The worker that answers.
    pub(in crate::relay) worker: Arc<Worker>,
    pub(in crate::relay) split: Split<Prefill>,
    pub(super) trial: Option<Trial>,
}

/// The worker of the prefill leg.
#[derive(Debug)]
pub(in crate::relay) struct Prefill {
    pub(in crate::relay) decision: Decision,
    pub(in crate::relay) worker: Arc<Worker>,
    pub(super) trial: Option<Trial>,
    pub(super) transfer_trial: Option<TransferTrial>,
    /// What its bootstrap server reported, for connectors that need it.
    pub(in crate::relay) bootstrap_info: Option<Arc<BootstrapInfo>>,
    /// See [`Prefill::is_needed`].
    pub(super) done_at: OnceLock<Instant>,
}

pub(in crate::relay) struct PrefillLeg {
    pub(in crate::relay) worker: Arc<Worker>,
    /// The dp rank that it was pinned to.
    pub(in crate::relay) rank: Option<u32>,
    pub(in crate::relay) decision: Decision,
    /// The prompt's tokens and those that the prefill worker had cached, if the answer is the decode worker's.
    pub(in crate::relay) tokens: Option<(u64, u64)>,
}

impl Choice {
    /// True if the request is the trial of this worker's circuit breaker, which has not opened again since.
    pub(in crate::relay) fn is_trial_of(&self, worker: &Worker) -> bool {
        let prefill = self.split.prefill();
        let of_prefill = prefill.and_then(|prefill| prefill.trial.as_ref());
        let mut trials = self.trial.iter().chain(of_prefill);
        trials.any(|trial| trial.worker.id == worker.id && trial.counts())
    }
}

impl Prefill {
    /// True if the request is the trial of the circuit breaker of this worker's KV transfers, which has not opened
    /// again since.
    pub(in crate::relay) fn is_transfer_trial(&self) -> bool {
        let trial = self.transfer_trial.as_ref();
        trial.is_some_and(TransferTrial::counts)
    }

    /// The decode worker has the prompt's blocks by then.
    pub(in crate::relay) fn set_done(&self, at: Instant) {
        let _ = self.done_at.set(at);
    }

    /// False once the answer goes on whatever becomes of this worker.
    pub(in crate::relay) fn is_needed(&self, now: Instant) -> bool {
        self.done_at.get().is_none_or(|at| now < *at)
    }

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
pub(in crate::relay) struct Trial {
    pub(super) worker: Arc<Worker>,
    pub(super) admitted_at: Instant,
}

impl Trial {
    fn counts(&self) -> bool {
        self.worker.breaker.counts_trial(self.admitted_at)
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        let breaker = &self.worker.breaker;
        breaker.release_trial(self.admitted_at, observe::now());
    }
}

/// As [`Trial`], of the circuit breaker of a prefill worker's KV transfers.
#[derive(Debug)]
pub(in crate::relay) struct TransferTrial {
    pub(super) prefill: Arc<Worker>,
    pub(super) admitted_at: Instant,
}

impl TransferTrial {
    fn counts(&self) -> bool {
        let breaker = &self.prefill.kv_transfer_breaker;
        breaker.counts_trial(self.admitted_at)
    }
}

impl Drop for TransferTrial {
    fn drop(&mut self) {
        let breaker = &self.prefill.kv_transfer_breaker;
        breaker.release_trial(self.admitted_at, observe::now());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::fleet::registry::tests::worker;

    #[test]
    fn a_trial_of_kv_transfers_that_shows_nothing_leaves_it_to_the_next_request() {
        let (prefill, now) = (worker("p"), observe::now());
        let breaker = &prefill.kv_transfer_breaker;
        while !breaker.on_failure(now) {}
        let later = now + Duration::from_secs(3_600);
        assert!(breaker.admit(later));
        let trial = TransferTrial {
            prefill: prefill.clone(),
            admitted_at: later,
        };
        assert!(!breaker.may_admit(later));
        drop(trial);
        assert!(breaker.may_admit(later));
    }

    #[test]
    fn a_trial_ends_no_later_half_open_period_than_its_own() {
        let (prefill, now) = (worker("p"), observe::now());
        let hours = |hours: u64| now + Duration::from_secs(hours * 3_600);
        for breaker in [&prefill.breaker, &prefill.kv_transfer_breaker] {
            while !breaker.on_failure(now) {}
            assert!(breaker.admit(hours(1)));
        }
        let trial = Trial {
            worker: prefill.clone(),
            admitted_at: hours(1),
        };
        let transfer_trial = TransferTrial {
            prefill: prefill.clone(),
            admitted_at: hours(1),
        };
        assert!(trial.counts() && transfer_trial.counts());
        for breaker in [&prefill.breaker, &prefill.kv_transfer_breaker] {
            assert!(breaker.on_failure(hours(2)));
            assert!(breaker.admit(hours(3)));
        }
        assert!(!trial.counts() && !transfer_trial.counts());
        drop((trial, transfer_trial));
        assert!(!prefill.breaker.may_admit(hours(3)));
    }

    fn fail(_trial: Trial) {
        panic!("a defect");
    }

    #[test]
    fn a_trial_whose_task_panics_leaves_it_to_the_next_request() {
        let (worker, now) = (worker("w"), observe::now());
        while !worker.breaker.on_failure(now) {}
        let later = now + Duration::from_secs(3_600);
        assert!(worker.breaker.admit(later));
        let trial = Trial {
            worker: worker.clone(),
            admitted_at: later,
        };
        let task = std::thread::spawn(move || fail(trial));
        assert!(task.join().is_err());
        assert!(worker.breaker.may_admit(later));
    }
}
