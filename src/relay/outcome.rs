//! The outcome of one attempt at a worker, or at a prefill and a decode worker. Pure.

use std::sync::Arc;
use std::time::Instant;

use super::choice::NotDisaggregated;
use super::exchange;
use super::failure_owner::FailureOwner;
use super::retries::Failure;
use super::running::Running;
use crate::observe;
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
    /// Connections that broke after the request was sent over them.
    pub(super) cuts: u32,
}

impl FailedAttempt {
    /// True if the worker had closed the idle connection that the attempt used.
    pub(super) fn is_stale(&self) -> bool {
        self.failure == Failure::Broken && self.owner == FailureOwner::Unattributed
    }
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

impl FailedAttempt {
    /// An exchange without an answer at the worker called `name`, for a request whose time ends at `deadline`.
    pub(super) fn unanswered(
        stage: Stage,
        name: &str,
        error: &exchange::Error,
        deadline: Instant,
    ) -> Self {
        let now = observe::now();
        Self {
            stage,
            failure: error.failure(now, deadline),
            error: format!("{name}: {error}"),
            answer: None,
            owner: error.owner(now, deadline),
            cuts: error.cuts(),
        }
    }

    pub(super) fn refused(stage: Stage, failure: Failure, answer: AttemptAnswer) -> Self {
        let name = &answer.running.worker().name;
        Self {
            stage,
            failure,
            error: format!("{name} answered {}", answer.answer.head.status),
            owner: answer.answer.owner(),
            answer: Some(answer),
            cuts: 0,
        }
    }

    pub(super) fn at_prefill(failure: Failure, error: String) -> Self {
        Self {
            stage: Stage::Prefill,
            failure,
            error,
            answer: None,
            owner: FailureOwner::Unattributed,
            cuts: 0,
        }
    }
}
