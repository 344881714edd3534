//! How requests end. Pure.

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::relay) enum Outcome {
    /// The whole answer went to the client, whatever its status.
    Complete,
    ClientDisconnected,
    /// No worker answered, or the worker's answer broke off.
    WorkerFailed,
    /// The worker sent nothing for `stream_idle_timeout`.
    StreamIdleTimeout,
    /// The request took longer than `request_timeout`.
    RequestTimeout,
    /// No worker had room for it, so it was sent to none.
    NotQueued,
    /// The router refused it before any worker was chosen: its fault, or a limit of its tenant.
    Refused,
    /// The router itself could not: its store is away, it drains, it has no connections left.
    RouterFailed,
}

impl Outcome {
    pub(in crate::relay) fn as_str(self) -> &'static str {
        match self {
            Outcome::Complete => "complete",
            Outcome::ClientDisconnected => "client_disconnected",
            Outcome::WorkerFailed => "worker_failed",
            Outcome::StreamIdleTimeout => "stream_idle_timeout",
            Outcome::RequestTimeout => "request_timeout",
            Outcome::NotQueued => "not_queued",
            Outcome::Refused => "refused",
            Outcome::RouterFailed => "router_failed",
        }
    }
}
