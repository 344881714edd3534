//! The outcome of one attempt at a worker, or at a prefill and a decode worker. Pure.

use std::sync::Arc;

use super::choice::NotDisaggregated;
use super::exchange;
use super::retries::Failure;
use super::running::Running;
use crate::routing::Decision;

pub(super) enum AttemptOutcome {
    Answered(AttemptAnswer),
    Failed(FailedAttempt),
}

/// An engine's answer, with what its request counts for at the worker.
pub(super) struct AttemptAnswer {
    pub(super) answer: exchange::Answer,
    pub(super) running: Running,
    pub(super) decision: Decision,
    /// How many attempts there were, this one included.
    pub(super) attempts: u32,
    /// The prefill leg, or why there was none. `None` if disaggregation is not configured.
    pub(super) prefill: Option<Result<PrefillLeg, NotDisaggregated>>,
}

/// The prefill leg of a disaggregated request.
pub(super) struct PrefillLeg {
    pub(super) worker: Arc<str>,
    pub(super) decision: Decision,
    /// Tokens that the prefill worker had cached, if the answer is the decode worker's.
    pub(super) cached_tokens: Option<u64>,
}

/// A failed attempt, of which nothing went to the client.
pub(super) struct FailedAttempt {
    pub(super) stage: Stage,
    pub(super) failure: Failure,
    /// For logs and for the client's error.
    pub(super) error: String,
    /// A retryable answer (503, ...): it goes to the client if no other attempt does better.
    pub(super) answer: Option<AttemptAnswer>,
    pub(super) owner: FailureOwner,
}

/// Where an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// At the worker that was to answer.
    Worker,
    /// At the prefill worker.
    Prefill,
    /// During the KV transfer between the two.
    Transfer,
}

/// Which circuit breaker counts the failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FailureOwner {
    Nobody,
    /// That of the worker where the attempt failed.
    Worker,
    /// That of KV transfers from the prefill worker.
    KvTransfer,
}

impl FailureOwner {
    fn worker_if(is_owner: bool) -> Self {
        match is_owner {
            true => Self::Worker,
            false => Self::Nobody,
        }
    }

    pub(super) fn of(error: &exchange::Error) -> Self {
        Self::worker_if(!error.is_stale())
    }
}

impl FailedAttempt {
    pub(super) fn refused(stage: Stage, failure: Failure, answer: AttemptAnswer) -> Self {
        let name = &answer.running.worker().name;
        Self {
            stage,
            failure,
            error: format!("{name} answered {}", answer.answer.head.status),
            // 503 is a busy worker; a proxy in front of an engine answers 502 and 504 for a dead one.
            owner: FailureOwner::worker_if(answer.answer.is_failure()),
            answer: Some(answer),
        }
    }

    pub(super) fn at_prefill(failure: Failure, error: String) -> Self {
        Self {
            stage: Stage::Prefill,
            failure,
            error,
            answer: None,
            owner: FailureOwner::Nobody,
        }
    }
}
