//! Metrics of WebSocket mode.

use prometheus::{IntCounterVec, IntGauge};

use crate::observe::metrics::Registry;

#[derive(Debug)]
pub(super) struct Metrics {
    pub(super) connections: IntGauge,
    pub(super) refused: IntCounterVec,
    pub(super) closed: IntCounterVec,
    pub(super) memory: IntGauge,
    pub(super) limited: IntCounterVec,
}

impl Metrics {
    pub(super) fn new(registry: &Registry) -> Self {
        Self {
            connections: registry.gauge(
                "warmroute_websocket_connections",
                "WebSockets of clients that are open.",
            ),
            refused: registry.counters(
                "warmroute_websocket_connections_refused_total",
                "WebSockets refused because too many were open, by reason: in all (`total`) or of one tenant (`tenant`).",
                &["reason"],
            ),
            closed: registry.counters(
                "warmroute_websocket_connections_closed_total",
                "WebSockets that ended, by reason: `client` (it closed or was lost), `over` (too old, or without a turn \
                 for too long), `drain`, `unresponsive` (no answer to pings), `send_timeout` (the client reads nothing), \
                 `memory` (none for a large message of it), \
                 `protocol` (bytes that are no WebSocket's, or a message that is too large).",
                &["reason"],
            ),
            memory: registry.gauge(
                "warmroute_websocket_memory_bytes",
                "What all WebSockets together remember of responses, and turns that wait on them.",
            ),
            limited: registry.counters(
                "warmroute_websocket_limits_reached_total",
                "What bounds of a WebSocket refused or forgot, by bound: `queue` (a turn was refused), `lanes` (a turn \
                 named one lane too many), `memory` (the latest response of a lane was forgotten), `messages` (a large message \
                 was not read to its end).",
                &["bound"],
            ),
        }
    }
}
