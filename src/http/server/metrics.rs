//! A listener's metrics.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use crate::observe::metrics::metric_table;

metric_table! {
    #[derive(Clone, Debug)]
    pub struct Metrics {
        pub(super) connections: gauge "warmroute_connections" "Open client connections.",
        pub(super) parked: gauge "warmroute_connections_parked"
            "Open client connections that have been without a request for a while and take no buffers.",
        pub(super) accepted: counter "warmroute_connections_accepted_total" "Accepted client connections.",
        pub(super) at_limit: counter "warmroute_connections_limit_reached_total"
            "Times that accepting paused because the maximum of connections was open.",
        pub(super) accept_errors: counter "warmroute_accept_errors_total"
            "Client connections that could not be accepted, mostly for lack of file descriptors.",
        pub(super) closed: counters "warmroute_connections_closed_total" ["reason"]
            "Client connections that the router closed, by reason: idle, header_timeout, send_timeout, pipelined (more than 64 \
             KiB behind a request that runs), proxy_header (missing or malformed).",
        pub(super) reset: counter "warmroute_streams_reset_total"
            "HTTP/2 streams that the router reset because their client took no byte of a waiting response for the send \
             time-out. Other streams of the connection go on.",
    } and {
        /// The most connections since [`Metrics::take_peak`].
        peak: Arc<AtomicI64>,
    }
}

impl Metrics {
    pub fn connections(&self) -> i64 {
        self.connections.get()
    }

    /// Notes how many are open, after one more was.
    pub(super) fn note_peak(&self) {
        self.peak
            .fetch_max(self.connections.get(), Ordering::Relaxed);
    }

    /// The most connections that were open since the last call.
    pub fn take_peak(&self) -> i64 {
        self.peak.swap(self.connections.get(), Ordering::Relaxed)
    }

    /// Open client connections that have buffers.
    pub fn buffered(&self) -> i64 {
        self.connections.get() - self.parked.get()
    }
}
