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
    /// An unused connection is closed after this time. Zero: no connection is reused.
    #[serde(skip)]
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
            // The servers of vLLM and SGLang close such a connection after 5 s. Closing it earlier here avoids sending a
            // request into a connection that is being closed.
            idle_connection_timeout: Duration::from_secs(4),
            // As many as an engine runs requests at a time by default.
            max_idle_connections: 256,
        }
    }
}
