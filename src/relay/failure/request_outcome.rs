//! How requests end. Pure.

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
