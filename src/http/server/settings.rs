//! Settings of a listener's connections.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::DurationText;

/// Connections of clients.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Connections that are served at a time; more wait in the kernel's backlog. 16,384 streams need about 1 GB
    /// of memory for sockets and tasks.
    #[schemars(range(min = 1))]
    pub max_connections: u32,
    /// File descriptors that are kept for connections to engines, where the limit of open files does not allow
    /// `max_connections`. Left out: as many as for clients, since each may wait for an engine. For clients that are idle most
    /// of the time, such as WebSockets between turns, the number of requests that run at a time is enough.
    pub engine_descriptors: Option<u32>,
    /// From the first byte of a request to the end of its header; then the connection is closed.
    #[serde(with = "DurationText")]
    pub header_timeout: Duration,
    /// A connection without a request is closed after this time. Common load balancers close theirs after 60 s
    /// and should be first, so that they send no request into a connection that is being closed.
    #[serde(with = "DurationText")]
    pub idle_timeout: Duration,
    /// A connection is closed if the client takes no byte of a waiting response for this long, and an HTTP/2 stream
    /// reset if the client grants it no window for as long.
    #[serde(with = "DurationText")]
    pub send_timeout: Duration,
    /// Requests at a time on one HTTP/2 connection.
    #[serde(skip)]
    pub max_http2_streams: u32,
    /// Bytes that all streams of one HTTP/2 connection together may have sent and nobody has read. They count in no
    /// memory budget.
    #[serde(skip)]
    pub http2_connection_window: u32,
    /// Each connection must begin with a PROXY protocol header (version 1 or 2), which names the client; others
    /// are closed.
    pub proxy_protocol: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_connections: 16_384,
            engine_descriptors: None,
            header_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(75),
            send_timeout: Duration::from_secs(60),
            // A gateway has few connections and many requests on each.
            max_http2_streams: 1_024,
            // 12 bodies of a connection may wait for more memory, each with its stream's window full, or 4 that have
            // none; a quarter is left to others. Not more, since each connection may take so much while they wait, with
            // `max_connections` 64 GiB.
            http2_connection_window: 4 << 20,
            proxy_protocol: false,
        }
    }
}
