//! How a request ends, and how and where an attempt fails. Pure.

use crate::observe::metrics::words;

words! {
    /// How a request ended.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub(in crate::relay) enum Outcome {
        /// The whole answer went to the client, whatever its status.
        Complete = "complete",
        ClientDisconnected = "client_disconnected",
        /// No worker answered, or the worker's answer broke off.
        WorkerFailed = "worker_failed",
        /// The worker sent nothing for `stream_idle_timeout`.
        StreamIdleTimeout = "stream_idle_timeout",
        /// The request took longer than `request_timeout`.
        RequestTimeout = "request_timeout",
        /// No worker had room for it, so it was sent to none.
        NotQueued = "not_queued",
        /// The router refused it before any worker was chosen: its fault, or a limit of its tenant.
        Refused = "refused",
        /// The router itself could not: its store is away, it drains, it has no connections left.
        RouterFailed = "router_failed",
    }
}

words! {
    /// How an attempt failed.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub enum Failure {
        /// The router had no file descriptor, port or memory for a connection.
        Local = "router_resources",
        /// No connection to the worker.
        Connect = "connect",
        /// The connection broke after the request was sent and before its answer.
        Broken = "connection_lost",
        /// No answer within the attempt's time limit.
        TimedOut = "timeout",
        /// The time of the whole request, all attempts together, is over.
        Deadline = "request_timeout",
        /// The engine answered with a retryable status (503, ...).
        Refused = "refused",
        /// The engine refused the request, and its context may be too short for it, unlike another one's.
        TooLong = "context_too_short",
        /// The answer is none that an engine gives to a request: a redirect, or another protocol.
        NoAnswer = "invalid_answer",
        /// The engine refused the key that the router has for it (`api_key`), not one of the client.
        KeyRefused = "key_refused",
        /// The KV transfer from the prefill to the decode worker failed.
        KvTransfer = "kv_transfer",
        /// The worker was taken out before it answered.
        TakenOut = "worker_taken_out",
    }
}

impl Failure {
    /// True if its retry takes nothing more from the retry budget: what was not sent costs the fleet nothing, and a request that is
    /// released has paid before.
    pub fn is_free(self) -> bool {
        matches!(self, Failure::Local | Failure::TakenOut)
    }

    /// For clients: without the worker's address, which errors of its connection may have.
    pub fn explanation(self) -> &'static str {
        match self {
            Failure::Local => "the router could open no connection",
            Failure::Connect => "cannot connect",
            Failure::Broken => "the connection closed before the answer",
            Failure::TimedOut => "timed out",
            Failure::Deadline => "the request's time was over",
            Failure::Refused => "it refused the request",
            Failure::TooLong => "its context may be too short for the request",
            Failure::NoAnswer => {
                "it answered with a redirect or another protocol, as no engine does"
            }
            Failure::KeyRefused => "it refused the key that the router has for it",
            Failure::KvTransfer => "the KV transfer failed",
            Failure::TakenOut => "the worker was taken out before it answered",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::relay) enum Stage {
    /// At the worker that was to answer.
    Worker,
    /// At the prefill worker.
    Prefill,
    /// During the KV transfer between the two.
    Transfer,
}
