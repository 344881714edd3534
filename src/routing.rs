//! The choice of a worker: a pure function of a request and a view of the fleet, which also says why.
//!
//! No I/O, no lock, no clock, and no randomness but the request's seed: the same view gives the same
//! decision.

pub mod cost;
pub mod pair;
pub mod policy;
pub mod rendezvous;
mod types;

use serde::{Deserialize, Serialize};

pub use self::policy::decide;
pub use self::types::{Cached, Decision, Policy, Reason, Request, State, View};

/// How a model's requests are spread.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    pub policy: Policy,
    /// cache_aware: how much a token to compute weighs beyond the time it takes, since computing it
    /// also delays everyone behind it.
    pub lambda: f64,
    /// cache_aware: what a token that others are decoding weighs against one to compute.
    pub mu: f64,
    /// cache_aware: what a token that a worker holds below its GPU's memory saves of computing it, from
    /// 0 to 1; one in the GPU saves all.
    pub tier_credit: TierCredit,
    /// cache_aware: how many of the workers that hold the most of the prompt are looked at.
    pub holders: u32,
    /// How many other workers are looked at, drawn anew for each request; in a fleet of up to so
    /// many, all are.
    pub sampled: u32,
    /// consistent_hash: what stays together; the first that a request has. `header:NAME`, or a field
    /// of the body: `session_id`, `prompt_cache_key`, `user`.
    pub hash_on: Vec<String>,
    /// Whether an engine whose cache is known in part only is asked to tell again which of a prompt's
    /// blocks it had, with each request that could tell something (vLLM's `kv_cache_report_mode`).
    pub ask_reports: bool,
}

/// What a held token counts, by the tier that it is in.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TierCredit {
    pub cpu: f64,
    pub disk: f64,
}

impl Default for TierCredit {
    fn default() -> Self {
        // A token of an 8B model is 128 KiB of cache, and takes 80 us to compute at 12,000 tokens/s. Over
        // PCIe at 25 GB/s it comes in 5 us, from a fast disk at 4 GB/s in 33 us, which would be 0.94
        // and 0.6. Less than that, for it also takes room in the GPU from what others hold there,
        // and larger models on several GPUs compute faster than one link brings.
        Self {
            cpu: 0.8,
            disk: 0.4,
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            policy: Policy::CacheAware,
            // From simulation over two public traces: TTFT is flat between 2 and 8 and best at 4, where
            // reuse is near its bound too; and a decode weight of 0.02 costs at most 5 % of
            // TTFT for evener decoding.
            lambda: 4.0,
            mu: 0.02,
            tier_credit: TierCredit::default(),
            holders: 8,
            // The best of 16 drawn is among the least busy 6 %, at a cost that does not grow with the fleet.
            sampled: 16,
            hash_on: [
                "header:x-session-id",
                "session_id",
                "prompt_cache_key",
                "user",
            ]
            .map(str::to_owned)
            .to_vec(),
            // It changes a client's request, and makes an engine say what it has said before.
            ask_reports: false,
        }
    }
}
