//! A listener's metrics.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use prometheus::{IntCounter, IntCounterVec, IntGauge};

use crate::observe::metrics::Registry;

/// A listener's metrics.
#[derive(Clone, Debug)]
pub struct Metrics {
    pub(super) connections: IntGauge,
    /// The most connections since [`Metrics::take_peak`].
    peak: Arc<AtomicI64>,
    pub(super) parked: IntGauge,
    pub(super) accepted: IntCounter,
    pub(super) at_limit: IntCounter,
    pub(super) accept_errors: IntCounter,
    pub(super) closed: IntCounterVec,
    pub(super) reset: IntCounter,
}

impl Metrics {
    pub fn new(registry: &Registry) -> Self {
        Self {
            connections: registry
                .gauge("warmroute_connections", "Open client connections."),
            peak: Arc::default(),
            parked: registry.gauge(
                "warmroute_connections_parked",
                "Open client connections that have been without a request for a while and take no buffers.",
            ),
            accepted: registry.counter(
                "warmroute_connections_accepted_total",
                "Accepted client connections.",
            ),
            at_limit: registry.counter(
                "warmroute_connections_limit_reached_total",
                "Times that accepting paused because the maximum of connections was open.",
            ),
            accept_errors: registry.counter(
                "warmroute_accept_errors_total",
                "Client connections that could not be accepted, mostly for lack of file descriptors.",
            ),
            closed: registry.counters(
                "warmroute_connections_closed_total",
                "Client connections that the router closed, by reason: idle, header_timeout, send_timeout, \
                 pipelined (more than 64 KiB behind a request that runs), proxy_header (missing or malformed).",
                &["reason"],
            ),
            reset: registry.counter(
                "warmroute_streams_reset_total",
                "HTTP/2 streams that the router reset because their client took no byte of a waiting response for the \
                 send time-out. Other streams of the connection go on.",
            ),
        }
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
