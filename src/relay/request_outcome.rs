//! How requests end. Pure.

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Outcome {
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
}

impl Outcome {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Outcome::Complete => "complete",
            Outcome::ClientDisconnected => "client_disconnected",
            Outcome::WorkerFailed => "worker_failed",
            Outcome::StreamIdleTimeout => "stream_idle_timeout",
            Outcome::RequestTimeout => "request_timeout",
            Outcome::NotQueued => "not_queued",
        }
    }
}
