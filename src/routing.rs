//! The choice of a worker: a pure function of a request and a view of the fleet, which says why.
//!
//! No I/O, no lock, no clock, no randomness but the request's seed: the same view gives the same
//! decision.

pub mod cost;
pub mod pair;
pub mod policy;
pub mod sticky;

use serde::{Deserialize, Serialize};

pub use self::policy::{Policy, decide};

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

/// What a decision needs to know of a request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Request {
    pub prompt_tokens: u32,
    /// The hash of what keeps requests together, for consistent_hash.
    pub affinity: Option<u64>,
    /// Counts the model's requests, for round_robin.
    pub ticket: u64,
    /// Breaks ties and draws samples.
    pub seed: u64,
}

/// Tokens of a prompt's start that a worker holds, by where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Cached {
    pub gpu: u32,
    pub cpu: u32,
    pub disk: u32,
}

impl Cached {
    pub fn in_gpu(gpu: u32) -> Self {
        Self {
            gpu,
            ..Self::default()
        }
    }

    /// In any tier.
    pub fn tokens(&self) -> u32 {
        self.gpu + self.cpu + self.disk
    }

    /// How many tokens in the GPU they are worth.
    #[inline]
    pub fn credit(&self, credit: &TierCredit) -> u32 {
        if self.cpu | self.disk == 0 {
            return self.gpu;
        }
        let lower = f64::from(self.cpu) * credit.cpu + f64::from(self.disk) * credit.disk;
        self.gpu + lower as u32
    }
}

/// One worker at the moment of a decision.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct State {
    /// Whether it may be chosen at all.
    pub is_usable: bool,
    pub requests: u32,
    /// Uncached prompt tokens that it has been given and has not computed yet.
    pub pending_tokens: u64,
    /// Prompt tokens of the requests that it is decoding.
    pub decode_tokens: u64,
}

/// The workers that serve a model, by place.
pub trait View {
    fn len(&self) -> usize;

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn state(&self, place: usize) -> State;

    /// Of a worker's state, what most often tells that it is not worth a look at the rest.
    fn pending_tokens(&self, place: usize) -> u64 {
        self.state(place).pending_tokens
    }

    /// Stays the same for a worker as long as it is called the same, on every replica.
    fn identity(&self, place: usize) -> u64;

    /// The workers known to hold the most of the prompt.
    fn holders(&self) -> &[usize];

    /// What any other worker holds is worth no more tokens in the GPU than this. The more it is, the more
    /// of them have to be looked at closely.
    fn others_max(&self) -> u32 {
        u32::MAX
    }

    /// What a worker holds of the prompt's start.
    fn cached(&self, place: usize) -> Cached;
}

/// Why a worker was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// It holds more of the prompt than any other.
    Warmest,
    /// Another one holds more, and is too busy to be worth it.
    LessBusy,
    /// Nobody holds any of it: the cheapest.
    Cold,
    /// The key's own worker.
    Affinity,
    /// Its turn.
    Turn,
    /// Drawn.
    Drawn,
    /// The least requests of those looked at.
    LeastLoad,
}

impl Reason {
    pub const ALL: [Reason; 7] = [
        Reason::Warmest,
        Reason::LessBusy,
        Reason::Cold,
        Reason::Affinity,
        Reason::Turn,
        Reason::Drawn,
        Reason::LeastLoad,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Reason::Warmest => "warmest",
            Reason::LessBusy => "less_busy",
            Reason::Cold => "cold",
            Reason::Affinity => "affinity",
            Reason::Turn => "turn",
            Reason::Drawn => "drawn",
            Reason::LeastLoad => "least_load",
        }
    }
}

/// A worker, by its place in the view, and why.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Decision {
    pub place: usize,
    pub reason: Reason,
    /// In any tier.
    pub cached_tokens: u32,
    /// To compute; what is in a lower tier counts for the part that bringing it costs.
    pub new_tokens: u32,
    pub cost: f64,
}
