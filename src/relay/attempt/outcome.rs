//! The outcome of one attempt at a worker, or at a prefill and a decode worker. Pure.

use std::time::Instant;

use super::exchange;
use super::running::Running;
use crate::observe;
use crate::relay::choose::chosen::{PrefillLeg, Split};
use crate::relay::failure::fault::Fault;
use crate::relay::failure::types::{Failure, Stage};
use crate::routing::Decision;
use crate::traces::TrySpan;

/// The answer is boxed where it is made: it passes through many futures, each of which would have room for it and copy it.
pub(in crate::relay) type AttemptOutcome = Result<Box<AttemptAnswer>, FailedAttempt>;

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
    pub(in crate::relay) fault: Fault,
    /// For logs and for the client's error.
    pub(in crate::relay) error: String,
    /// A retryable answer (503, ...): it goes to the client if no other attempt does better. Not one that refuses the router's own
    /// key, which is no client's business.
    pub(in crate::relay) answer: Option<Box<AttemptAnswer>>,
}

impl FailedAttempt {
    /// One without an answer.
    pub(in crate::relay) fn new(fault: Fault, error: String) -> Self {
        Self {
            fault,
            error,
            answer: None,
        }
    }

    /// An exchange without an answer at the worker called `name`, for a request whose time ends at `deadline`.
    pub(in crate::relay) fn unanswered(
        stage: Stage,
        name: &str,
        error: &exchange::Error,
        deadline: Instant,
    ) -> Self {
        let fault = error.fault(stage, observe::now(), deadline);
        Self::new(fault, format!("{name}: {error}"))
    }

    /// One that ended with this answer.
    pub(in crate::relay) fn answered(fault: Fault, mut answer: Box<AttemptAnswer>) -> Self {
        let name = &answer.running.worker().name;
        let status = answer.answer.head.status;
        let error = format!("{name} answered {status}");
        if let Some(span) = answer.running.span() {
            span.update(|tried| tried.status = Some(status.as_u16()));
            span.fail(observe::now(), fault.failure.as_str(), error.clone());
        }
        let is_for_client = fault.failure != Failure::KeyRefused;
        Self {
            fault,
            error,
            answer: is_for_client.then_some(answer),
        }
    }

    /// Ends the span of the try that failed, if the request is traced.
    pub(in crate::relay) fn end_try(&self, span: Option<&mut TrySpan>) {
        if let Some(span) = span {
            let failure = self.fault.failure.as_str();
            span.fail(observe::now(), failure, self.error.clone());
        }
    }
}
