//! Who is to blame for a failed attempt or for an answer that broke off. The only place that decides it: circuit
//! breakers, retries, the quarantine and metrics follow. Pure.

use hyper::StatusCode;

use super::types::{Failure, Outcome};
use crate::observe::metrics::words;

words! {
    /// Who is to blame. Circuit breakers of workers count only [`FailureOwner::Worker`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(in crate::relay) enum FailureOwner {
        /// A worker closed an idle connection just when the router used it, or is busy.
        Unattributed = "none",
        /// The router had no file descriptor, port or memory left.
        Router = "router",
        /// The request's own time was over: the client uploaded slowly, or the answer takes longer than
        /// `request_timeout`.
        Client = "client",
        /// The request or the worker: of a connection that was reset, of an answer that never came. It is the request, since what
        /// breaks one engine breaks the next, unless [`super::evidence`] speaks against the worker.
        Request = "request",
        /// The worker where the attempt failed.
        Worker = "worker",
        /// The KV transfers from the prefill worker, which have a circuit breaker of their own.
        KvTransfer = "kv_transfer",
    }
}

impl FailureOwner {
    /// The owner of the failure of an attempt without an answer. `is_stale`: the worker closed an idle connection just when
    /// the router used it.
    pub(in crate::relay) fn of_failure(failure: Failure, is_stale: bool) -> Self {
        match failure {
            Failure::Local => Self::Router,
            Failure::Deadline => Self::Client,
            Failure::Connect => Self::Worker,
            Failure::Broken if is_stale => Self::Unattributed,
            // A proxy before the engines may refuse what one request asks for as engines refuse a key.
            Failure::Broken | Failure::TimedOut | Failure::NoAnswer | Failure::KeyRefused => {
                Self::Request
            }
            // What took the worker out was counted already.
            Failure::Refused | Failure::TakenOut | Failure::TooLong => Self::Unattributed,
            Failure::KvTransfer => Self::KvTransfer,
        }
    }

    /// The owner of an answer with this status. 501 is a property of the request, and 503 means that the worker is
    /// overloaded or starting; a proxy in front of an engine answers 502 and 504 for a dead one.
    pub(in crate::relay) fn of_status(status: StatusCode) -> Self {
        let is_excused = matches!(
            status,
            StatusCode::NOT_IMPLEMENTED | StatusCode::SERVICE_UNAVAILABLE
        );
        if status.is_server_error() && !is_excused {
            Self::Request
        } else {
            Self::Unattributed
        }
    }

    /// The owner of an answer that ended like this.
    pub(in crate::relay) fn of_outcome(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Complete => Self::Unattributed,
            Outcome::ClientDisconnected
            | Outcome::RequestTimeout
            | Outcome::NotQueued
            | Outcome::Refused
            | Outcome::RouterFailed => Self::Client,
            Outcome::WorkerFailed | Outcome::StreamIdleTimeout => Self::Request,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_worker_that_takes_no_connection_is_to_blame_without_evidence() {
        for (failure, expected) in [
            (Failure::Local, FailureOwner::Router),
            (Failure::Deadline, FailureOwner::Client),
            (Failure::Connect, FailureOwner::Worker),
            (Failure::Broken, FailureOwner::Request),
            (Failure::TimedOut, FailureOwner::Request),
            (Failure::NoAnswer, FailureOwner::Request),
            (Failure::KeyRefused, FailureOwner::Request),
            (Failure::Refused, FailureOwner::Unattributed),
            (Failure::TooLong, FailureOwner::Unattributed),
            (Failure::TakenOut, FailureOwner::Unattributed),
            (Failure::KvTransfer, FailureOwner::KvTransfer),
        ] {
            assert_eq!(FailureOwner::of_failure(failure, false), expected);
        }
        let stale = FailureOwner::of_failure(Failure::Broken, true);
        assert_eq!(stale, FailureOwner::Unattributed);
    }

    #[test]
    fn a_busy_worker_and_a_request_that_no_engine_implements_are_no_failures() {
        for (status, expected) in [
            (200, FailureOwner::Unattributed),
            (400, FailureOwner::Unattributed),
            (429, FailureOwner::Unattributed),
            (500, FailureOwner::Request),
            (501, FailureOwner::Unattributed),
            (502, FailureOwner::Request),
            (503, FailureOwner::Unattributed),
            (504, FailureOwner::Request),
        ] {
            let status = StatusCode::from_u16(status).unwrap();
            assert_eq!(FailureOwner::of_status(status), expected, "{status}");
        }
    }

    #[test]
    fn a_client_that_leaves_or_asks_for_too_much_blames_no_worker() {
        for outcome in [Outcome::ClientDisconnected, Outcome::RequestTimeout] {
            assert_eq!(FailureOwner::of_outcome(outcome), FailureOwner::Client);
        }
    }
}
