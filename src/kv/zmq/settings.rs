//! The settings of KV events over ZeroMQ.

use std::time::Duration;

/// KV events over ZeroMQ.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// For connecting and for the handshake after it, each.
    pub connect_timeout: Duration,
    /// Wait before the second attempt to connect; doubles with each further one, less a random part.
    pub backoff: Duration,
    /// The longest wait between two attempts to connect.
    pub max_backoff: Duration,
    /// Silence after which the publisher is asked for a sign of life.
    pub heartbeat_interval: Duration,
    /// A publisher that gives no sign of life for this long is disconnected.
    pub heartbeat_timeout: Duration,
    /// A larger batch ends the connection. A batch that stores 1,000,000 tokens has 5 MB.
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
