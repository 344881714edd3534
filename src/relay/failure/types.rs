//! How and where an attempt fails. Pure.

/// How an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Failure {
    /// The router had no file descriptor, port or memory for a connection.
    Local,
    /// No connection to the worker.
    Connect,
    /// The connection broke after the request was sent and before its answer.
    Broken,
    /// No answer within the attempt's time limit.
    TimedOut,
    /// The time of the whole request, all attempts together, is over.
    Deadline,
    /// The engine answered with a retryable status (503, ...).
    Refused,
    /// The engine refused the request, and its context may be too short for it, unlike another one's.
    TooLong,
    /// The KV transfer from the prefill to the decode worker failed.
    KvTransfer,
    /// The worker was taken out before it answered.
    TakenOut,
}

impl Failure {
    /// Every value of [`Failure::as_str`].
    pub const REASONS: [&'static str; 9] = [
        "router_resources",
        "connect",
        "connection_lost",
        "timeout",
        "request_timeout",
        "refused",
        "context_too_short",
        "kv_transfer",
        "worker_taken_out",
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Failure::Local => "router_resources",
            Failure::Connect => "connect",
            Failure::Broken => "connection_lost",
            Failure::TimedOut => "timeout",
            Failure::Deadline => "request_timeout",
            Failure::Refused => "refused",
            Failure::TooLong => "context_too_short",
            Failure::KvTransfer => "kv_transfer",
            Failure::TakenOut => "worker_taken_out",
        }
    }

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
            Failure::KvTransfer => "the KV transfer failed",
            Failure::TakenOut => "the worker was taken out before it answered",
        }
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
