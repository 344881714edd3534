//! When requests are split over two workers, and how long the second waits for the first.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::fleet::handoff::Connector;
use crate::routing::pair;

/// What becomes of a request whose prompt no prefill worker has computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnPrefillFailure {
    /// The decode worker computes the prompt, as an engine does that is alone.
    #[default]
    Local,
    /// It fails, and no decode worker is slowed down by it.
    Fail,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// How engines bring blocks from one to the other; none: requests are never split.
    pub connector: Option<Connector>,
    /// Fewer tokens of the prompt than this that the decode worker does not hold: it computes them itself.
    pub remote_prefill_min_tokens: u32,
    pub on_prefill_failure: OnPrefillFailure,
    /// Workers that differ in this label are no pair. Empty: any two may be.
    pub topology: String,
    /// How long an engine keeps blocks that nobody fetches; 0 for what the connector's engines do by default.
    pub lease_ms: u64,
    /// From sending the decode leg to its first token, where an engine may wait much longer for blocks that
    /// never come and says nothing of them: Mooncake's.
    pub handoff_timeout_ms: u64,
    /// Of the bootstrap servers of Mooncake's prefill workers.
    pub bootstrap_port: u16,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            connector: None,
            remote_prefill_min_tokens: pair::Settings::default().remote_prefill_min_tokens,
            // A slow answer is better than none.
            on_prefill_failure: OnPrefillFailure::Local,
            topology: String::new(),
            lease_ms: 0,
            // Blocks come in a second; this is a queue at the decode worker in which few wait.
            handoff_timeout_ms: 30_000,
            // VLLM_MOONCAKE_BOOTSTRAP_PORT
            bootstrap_port: 8_998,
        }
    }
}

impl Settings {
    /// How long an engine keeps what nobody fetches.
    pub(super) fn lease(&self, connector: Connector) -> Duration {
        Duration::from_millis(match (self.lease_ms, connector) {
            // kv_lease_duration
            (0, Connector::Nixl) => 30_000,
            // VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT
            (0, Connector::Mooncake) => 480_000,
            (own, _) => own,
        })
    }
}
