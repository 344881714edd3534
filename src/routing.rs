//! The choice of a worker: a pure function of a request and a view of the fleet, which also says why.
//!
//! No I/O, no lock, no clock, and no randomness but the request's seed: the same view gives the same
//! decision.

mod affinity;
pub mod cost;
pub mod hindsight;
pub mod pair;
pub mod policy;
mod prefix_counts;
mod prefix_hash;
pub mod rendezvous;
mod types;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use self::policy::decide;
pub use self::prefix_counts::{PrefixCounts, key as shared_key};
pub use self::prefix_hash::key as prefix_key;
pub use self::types::{
    Backlog, Cached, Decision, Expected, Policy, Reason, Request, SharedPrefix, State, View,
    delayed,
};

/// Workers with the longest cached prefixes that a cache-aware decision compares. Prefixes that many workers have are as good
/// at each of them, and the random sample has the least busy of the others.
pub const PREFIX_CANDIDATES: usize = 8;

/// How requests are spread over the workers of their model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// How a worker is chosen.
    pub policy: Policy,
    /// consistent_hash: what keeps requests at the same worker; the first of these that a request has.
    /// `header:NAME`, or a field of the body: `session_id`, `prompt_cache_key`, `user`.
    pub hash_on: Vec<String>,
    /// Settings for experts.
    pub advanced: Advanced,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            policy: Policy::CacheAware,
            hash_on: [
                "header:x-session-id",
                "session_id",
                "prompt_cache_key",
                "user",
            ]
            .map(str::to_owned)
            .to_vec(),
            advanced: Advanced::default(),
        }
    }
}

/// Settings of routing for experts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Advanced {
    /// cache_aware: what a token that is cached below the GPU's memory saves of computing it.
    pub tier_credit: TierCredit,
}

/// What a cached token saves, by its tier; one in the GPU's memory saves all.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TierCredit {
    /// A token in CPU memory. Loading a token of an 8B model takes a sixteenth of computing it, and room in the
    /// GPU.
    #[schemars(range(min = 0, max = 1))]
    pub cpu: f64,
    /// A token on disk. Loading it from a fast disk takes two fifths of computing it, and room in the GPU.
    #[schemars(range(min = 0, max = 1))]
    pub disk: f64,
}

impl Default for TierCredit {
    fn default() -> Self {
        // A token of an 8B model is 128 KiB of cache, and takes 80 us to compute at 12,000 tokens/s. Over PCIe at
        // 25 GB/s it comes in 5 us, from a fast disk at 4 GB/s in 33 us, which would be 0.94 and 0.6. Less than
        // that, for it also takes room in the GPU, and larger models on several GPUs compute faster than one
        // link loads.
        Self {
            cpu: 0.8,
            disk: 0.4,
        }
    }
}
