//! The outcome of one attempt at a worker, or at a prefill and a decode worker. Pure.

use std::sync::Arc;
use std::time::Instant;

use super::chosen::Split;
use super::exchange;
use super::failure::failure_owner::FailureOwner;
use super::failure::retries::Failure;
use super::running::Running;
use crate::fleet::Worker;
use crate::observe;
use crate::routing::Decision;
use crate::traces::TrySpan;

pub(super) enum AttemptOutcome {
    Answered(AttemptAnswer),
    Failed(FailedAttempt),
}

/// An engine's answer, with what its request counts for at the worker.
pub(super) struct AttemptAnswer {
    pub(super) answer: exchange::Answer,
    pub(super) running: Running,
    pub(super) decision: Decision,
    /// True if the worker was sent a chat completion that was made of a request of the Responses API.
    pub(super) is_converted: bool,
    /// How many attempts there were, this one included.
    pub(super) attempts: u32,
    pub(super) split: Split<PrefillLeg>,
}

/// The prefill leg of a disaggregated request.
pub(super) struct PrefillLeg {
    pub(super) worker: Arc<Worker>,
    /// The dp rank that it was pinned to.
    pub(super) rank: Option<u32>,
    pub(super) decision: Decision,
    /// The prompt's tokens and those that the prefill worker had cached, if the answer is the decode worker's.
    pub(super) tokens: Option<(u64, u64)>,
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
    /// The connection broke after the request was sent over it.
    pub(super) is_cut: bool,
    /// The decode engine may have refused the dp rank that its leg was pinned to.
    pub(super) is_rank_refused: bool,
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
            is_cut: error.is_cut(),
            is_rank_refused: false,
        }
    }

    pub(super) fn refused(stage: Stage, failure: Failure, mut answer: AttemptAnswer) -> Self {
        let name = &answer.running.worker().name;
        let status = answer.answer.head.status;
        let error = format!("{name} answered {status}");
        if let Some(span) = answer.running.span() {
            span.update(|tried| tried.status = Some(status.as_u16()));
            span.fail(observe::now(), failure.as_str(), error.clone());
        }
        Self {
            stage,
            failure,
            error,
            owner: answer.answer.owner(),
            answer: Some(answer),
            is_cut: false,
            is_rank_refused: false,
        }
    }

    /// The answer of a decode engine that refuses the rank that its leg was pinned to: the next attempt names none.
    pub(super) fn refused_rank(answer: AttemptAnswer) -> Self {
        Self {
            is_rank_refused: true,
            ..Self::refused(Stage::Worker, Failure::KvTransfer, answer)
        }
    }

    /// Ends the span of the try that failed, if the request is traced.
    pub(super) fn end_try(&self, span: Option<&mut TrySpan>) {
        if let Some(span) = span {
            span.fail(observe::now(), self.failure.as_str(), self.error.clone());
        }
    }

    pub(super) fn at_prefill(failure: Failure, error: String) -> Self {
        Self::of_nobody(Stage::Prefill, failure, error)
    }

    /// One that is the fault of no worker, or whose fault is not known.
    pub(super) fn of_nobody(stage: Stage, failure: Failure, error: String) -> Self {
        Self {
            stage,
            failure,
            error,
            answer: None,
            owner: FailureOwner::Unattributed,
            is_cut: false,
            is_rank_refused: false,
        }
    }
}
