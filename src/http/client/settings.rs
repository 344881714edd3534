//! The settings of connections to workers.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::DurationText;

/// Connections to workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// A worker that accepts no connection within this time counts as failed for the request, which is retried
    /// elsewhere.
    #[serde(with = "DurationText")]
    pub connect_timeout: Duration,
    /// An unused connection to a worker is closed after this time. vLLM's server closes it after 5 s; closing it
    /// earlier here avoids sending a request into a connection that is being closed. `0s`: no connection is reused.
    #[serde(with = "DurationText")]
    #[schemars(extend("min" = "0s"))]
    pub idle_connection_timeout: Duration,
    /// Unused connections that are kept, for each worker and I/O thread; more are closed after their request. A thread that has
    /// none to a worker takes one that another thread has not used for 100 ms; those with TLS stay.
    #[serde(skip)]
    pub max_idle_connections: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(2),
            idle_connection_timeout: Duration::from_secs(4),
            // As many as an engine runs requests at a time by default.
            max_idle_connections: 256,
        }
    }
}
