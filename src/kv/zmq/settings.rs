//! The settings of KV events over ZeroMQ.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::{DurationText, SizeText};

/// KV events over ZeroMQ.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// For connecting and for the handshake after it, each.
    #[serde(with = "DurationText")]
    pub connect_timeout: Duration,
    /// Wait before the second attempt to connect; doubles with each further one, less a random part.
    #[serde(with = "DurationText")]
    pub backoff: Duration,
    /// The longest wait between two attempts to connect.
    #[serde(with = "DurationText")]
    pub max_backoff: Duration,
    /// Silence after which the publisher is asked for a sign of life.
    #[serde(with = "DurationText")]
    pub heartbeat_interval: Duration,
    /// A publisher that gives no sign of life for this long is disconnected.
    #[serde(with = "DurationText")]
    pub heartbeat_timeout: Duration,
    /// A larger batch ends the connection. A batch that stores 1,000,000 tokens has 5 MB.
    #[serde(with = "SizeText")]
    #[schemars(extend("min" = "64KiB"))]
    pub max_message: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            // Beyond a lost first packet of the handshake (1 s) and one more.
            connect_timeout: Duration::from_secs(3),
            backoff: Duration::from_millis(100),
            // An engine that is back is found within this; a fleet of 2,000 costs 1,000 attempts a second.
            max_backoff: Duration::from_secs(2),
            heartbeat_interval: Duration::from_secs(2),
            // An engine's socket thread answers at once, on a starved machine within a second or two.
            heartbeat_timeout: Duration::from_secs(5),
            max_message: 16 << 20,
        }
    }
}
