//! Settings of WebSocket mode.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::{DurationText, SizeText};

/// WebSocket mode (`GET /v1/responses` with an upgrade): turns one after the other, or side by side, on one connection,
/// which remembers the latest response of each of its lanes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Off: a client that asks for a WebSocket gets 426 and uses HTTP.
    pub enabled: bool,
    /// WebSockets open at a time; beyond it 503. Each counts in `api.advanced.max_connections` as well, which should be
    /// larger, so that HTTP has connections left. An idle one takes about 20 KB.
    #[schemars(range(min = 1))]
    pub max_connections: u32,
    /// WebSockets of one tenant open at a time, if there are tenants; beyond it 429.
    #[schemars(range(min = 1))]
    pub max_connections_per_tenant: u32,
    /// Age at which a connection takes no new turns; it closes (1000) when those that run have ended. OpenAI's is the same.
    #[serde(skip)]
    pub max_age: Duration,
    /// A connection without a turn for this long is closed (1000). As long as `max_age`, since clients keep a connection
    /// for a user who thinks.
    #[serde(skip)]
    pub idle_timeout: Duration,
    /// A ping is sent this often, so that no proxy in between takes the connection for dead. A client without a turn that
    /// has answered neither of two is disconnected (1011).
    #[schemars(extend("min" = "1s"))]
    #[serde(with = "DurationText")]
    pub ping_interval: Duration,
    /// Size of one message of a client; a larger one closes the connection (1009). 16 MiB are four million tokens, or some
    /// images.
    #[schemars(extend("min" = "1KiB"))]
    #[serde(with = "SizeText")]
    pub max_message_size: u64,
    /// Turns of one connection that wait, because their lane is busy, 16 turns run, or 16 MiB of turns before them wait
    /// for memory; beyond it they get the error 429.
    #[serde(skip)]
    pub max_queued_turns: u32,
    /// What one connection remembers and has waiting; the lanes used least recently are forgotten beyond it, and
    /// continue from the store if they are stored. 32 MiB are eight million tokens.
    #[schemars(extend("min" = "1KiB"))]
    #[serde(with = "SizeText")]
    pub max_memory: u64,
    /// The same of all connections together, messages above 64 KiB of which a part has come, and turns that wait for
    /// memory of `api.max_total_body`. Beyond it nothing more is remembered, no turn waits in a queue, and a connection
    /// with such a message is closed (1013).
    #[schemars(extend("min" = "1KiB"))]
    #[serde(with = "SizeText")]
    pub max_total_memory: u64,
    /// Prompts of turns with `generate: false` that are computed ahead at a time, by the worker whose cache the next turn
    /// then finds; more are not sent ahead. 0: none.
    #[serde(skip)]
    pub max_prewarms: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            enabled: true,
            max_connections: 8_192,
            max_connections_per_tenant: 2_048,
            max_age: Duration::from_secs(3_600),
            idle_timeout: Duration::from_secs(3_600),
            ping_interval: Duration::from_secs(30),
            max_message_size: 16 << 20,
            max_queued_turns: 64,
            max_memory: 32 << 20,
            max_total_memory: 1 << 30,
            max_prewarms: 32,
        }
    }
}
