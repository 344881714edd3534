//! Metrics of WebSocket mode.

use crate::observe::metrics::metric_table;

metric_table! {
    #[derive(Debug)]
    pub(super) struct Metrics {
        pub(super) connections: gauge "warmroute_websocket_connections" "WebSockets of clients that are open.",
        pub(super) refused: counters "warmroute_websocket_connections_refused_total" ["reason"]
            "WebSockets refused because too many were open, by reason: in all (`total`) or of one tenant (`tenant`).",
        pub(super) closed: counters "warmroute_websocket_connections_closed_total" ["reason"]
            "WebSockets that ended, by reason: `client` (it closed or was lost), `over` (too old, or without a turn for too \
             long), `drain`, `unresponsive` (no answer to pings), `send_timeout` (the client reads nothing), `memory` (none for \
             a large message of it), `protocol` (bytes that are no WebSocket's, or a message that is too large).",
        pub(super) memory: gauge "warmroute_websocket_memory_bytes"
            "What all WebSockets together remember of responses, and turns that wait on them.",
        pub(super) limited: counters "warmroute_websocket_limits_reached_total" ["bound"]
            "What bounds of a WebSocket refused or forgot, by bound: `queue` (a turn was refused), `lanes` (a turn named one \
             lane too many), `memory` (the latest response of a lane was forgotten), `messages` (a large message was not read \
             to its end).",
    }
}
