//! When requests are split over two workers, and how long the second waits for the first.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::fleet::kv_transfer::Connector;
use crate::routing::pair;
use crate::units::DurationText;

/// What happens to a request when no prefill worker is left or those that were tried failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnPrefillFailure {
    /// The decode worker computes the prompt.
    // A slow answer is better than none.
    #[default]
    Local,
    /// The request fails with 503, 502 or 504, and no decode worker is slowed down by it.
    Fail,
}

/// Disaggregated prefill/decode: a prefill worker computes a request's prompt, and a decode worker fetches the KV
/// blocks and generates.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// How KV blocks are transferred, as in the engines' `--kv-transfer-config`. Setting it turns disaggregation
    /// on; workers then may have the roles prefill and decode.
    pub connector: Option<Connector>,
    /// What happens when no prefill worker is left or those that were tried failed. With the connector `sglang` always
    /// `fail`, unless a worker of the role `both` is there: SGLang's decode workers compute no prompts.
    pub on_prefill_failure: OnPrefillFailure,
    /// Name of a worker label, such as `zone`: KV blocks are transferred only between workers with the same value
    /// of it. Workers without it can be paired with each other. Empty: between any two.
    pub topology: String,
    /// Settings for experts.
    pub advanced: Advanced,
}

/// Settings of disaggregation for experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Advanced {
    /// A decode worker that lacks fewer tokens of the prompt than this computes them itself; it does not lack those that it
    /// has in CPU memory or on disk. 256 tokens take about one step of a busy decode worker. sglang does not use it.
    pub min_remote_tokens: u32,
    /// How long engines keep KV blocks that are never fetched, used for metrics: NIXL's `kv_lease_duration`,
    /// Mooncake's `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`. `0s`: their defaults, 30 s and 480 s.
    #[serde(with = "DurationText")]
    #[schemars(extend("min" = "0s"))]
    pub kv_lease: Duration,
    /// mooncake, sglang: a streamed request without its first token for this long after the decode leg was sent is
    /// cancelled and started again, since an engine may wait for minutes for KV blocks that never come. Longer
    /// than requests wait in a decode worker's queue. Other requests are cancelled only if the prefill process is
    /// gone. With all connectors but sglang, a prefill worker that is lost is taken to have handed its blocks over
    /// once twice this time is over and no requests wait at the decode worker: an answer that is not streamed goes
    /// on then. nixl and moriio use it for nothing else: their engines report failed transfers.
    #[serde(with = "DurationText")]
    pub transfer_timeout: Duration,
    /// mooncake, sglang: the port of the prefill workers' bootstrap server (`VLLM_MOONCAKE_BOOTSTRAP_PORT`,
    /// `--disaggregation-bootstrap-port`).
    #[schemars(range(min = 1))]
    pub bootstrap_port: u16,
}

impl Default for Advanced {
    fn default() -> Self {
        Self {
            min_remote_tokens: pair::Settings::default().min_remote_tokens,
            kv_lease: Duration::ZERO,
            // Blocks come in a second; this is a queue at the decode worker in which few wait.
            transfer_timeout: Duration::from_secs(30),
            bootstrap_port: 8_998,
        }
    }
}

impl Settings {
    /// How long an engine keeps KV blocks that are never fetched.
    pub(super) fn kv_lease(&self, connector: Connector) -> Duration {
        match connector {
            _ if !self.advanced.kv_lease.is_zero() => self.advanced.kv_lease,
            Connector::Nixl => Duration::from_secs(30),
            Connector::Mooncake => Duration::from_secs(480),
            // Its engines have no such setting.
            Connector::Moriio => Duration::from_secs(30),
            Connector::Sglang => Duration::from_secs(300),
        }
    }
}
