//! The outcome of one attempt at a worker, or at a prefill and a decode worker. Pure.

use std::time::Instant;

use super::exchange;
use super::running::Running;
use crate::observe;
use crate::relay::choose::choice::PrefillLeg;
use crate::relay::choose::chosen::Split;
use crate::relay::failure::failure_owner::FailureOwner;
use crate::relay::failure::retries::Failure;
use crate::routing::Decision;
use crate::traces::TrySpan;

pub(in crate::relay) enum AttemptOutcome {
    Answered(AttemptAnswer),
    Failed(FailedAttempt),
}

/// An engine's answer, with what its request counts for at the worker.
pub(in crate::relay) struct AttemptAnswer {
    pub(in crate::relay) answer: exchange::Answer,
    pub(in crate::relay) running: Running,
    pub(in crate::relay) decision: Decision,
    /// True if the worker was sent a chat completion that was made of a request of the Responses API.
    pub(in crate::relay) is_converted: bool,
    /// How many attempts there were, this one included.
    pub(in crate::relay) attempts: u32,
    pub(in crate::relay) split: Split<PrefillLeg>,
}

/// A failed attempt, of which nothing went to the client.
pub(in crate::relay) struct FailedAttempt {
    pub(in crate::relay) stage: Stage,
    pub(in crate::relay) failure: Failure,
    /// For logs and for the client's error.
    pub(in crate::relay) error: String,
    /// A retryable answer (503, ...): it goes to the client if no other attempt does better.
    pub(in crate::relay) answer: Option<AttemptAnswer>,
    pub(in crate::relay) owner: FailureOwner,
    /// The connection broke after the request was sent over it.
    pub(in crate::relay) is_cut: bool,
    /// The decode engine may have refused the dp rank that its leg was pinned to.
    pub(in crate::relay) is_rank_refused: bool,
}

impl FailedAttempt {
    /// True if the worker had closed the idle connection that the attempt used.
    pub(in crate::relay) fn is_stale(&self) -> bool {
        self.failure == Failure::Broken && self.owner == FailureOwner::Unattributed
    }
}

/// Where an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::relay) enum Stage {
    /// At the worker that was to answer.
    Worker,
    /// At the prefill worker.
    Prefill,
    /// During the KV transfer between the two.
    Transfer,
}

impl FailedAttempt {
    /// An exchange without an answer at the worker called `name`, for a request whose time ends at `deadline`.
    pub(in crate::relay) fn unanswered(
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

    pub(in crate::relay) fn refused(
        stage: Stage,
        failure: Failure,
        mut answer: AttemptAnswer,
    ) -> Self {
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
    pub(in crate::relay) fn refused_rank(answer: AttemptAnswer) -> Self {
        Self {
            is_rank_refused: true,
            ..Self::refused(Stage::Worker, Failure::KvTransfer, answer)
        }
    }

    /// Ends the span of the try that failed, if the request is traced.
    pub(in crate::relay) fn end_try(&self, span: Option<&mut TrySpan>) {
        if let Some(span) = span {
            span.fail(observe::now(), self.failure.as_str(), self.error.clone());
        }
    }

    pub(in crate::relay) fn at_prefill(failure: Failure, error: String) -> Self {
        Self::of_nobody(Stage::Prefill, failure, error)
    }

    /// One that is the fault of no worker, or whose fault is not known.
    pub(in crate::relay) fn of_nobody(stage: Stage, failure: Failure, error: String) -> Self {
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
