//! The input and output of a decision: a request, a view of the fleet, a worker with its reason.

use std::num::NonZeroU64;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::fleet::speed::Speed;
use crate::ids::{ViewIndex, WorkerIndex};
use crate::observe::metrics::words;

words! {
    /// How a worker is chosen.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
    #[serde(rename_all = "snake_case")]
    pub enum Policy {
        /// The worker at which the request costs the fewest seconds, its own and those that it takes from others: a cached prefix
        /// saves some, a queue and the answers that are generated there cost some.
        #[default]
        CacheAware = "cache_aware",
        /// One worker after the other.
        RoundRobin = "round_robin",
        /// A random worker.
        Random = "random",
        /// The worker with the fewest requests in flight.
        LeastLoad = "least_load",
        /// The one of two random workers with fewer requests in flight.
        PowerOfTwo = "power_of_two",
        /// The worker that the request's key (`hash_on`) hashes to, unless it has too many requests: session affinity.
        ConsistentHash = "consistent_hash",
    }
}

/// What a decision needs to know of a request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Request {
    /// 0 if no worker computes the prompt.
    pub prompt_tokens: u32,
    /// Tokens that its answer is expected to have; 0 if it has none.
    pub answer_tokens: f64,
    /// The hash of the session affinity key, for consistent_hash.
    pub affinity: Option<u64>,
    /// The hash of the prompt's first blocks, the same on every replica.
    pub prefix_key: Option<u64>,
    /// True while no other replica is connected, although there are others: they route by `prefix_key` too, so that
    /// prompts with the same start meet at the same worker.
    pub is_alone: bool,
    /// The number of the request among its model's, which begin at any number: for round_robin.
    pub ticket: u64,
    /// Draws the random sample and breaks ties.
    pub seed: u64,
}

/// Length in tokens of a worker's cached prefix of the prompt, by the tier that has the tokens.
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

    /// In all tiers.
    pub fn tokens(&self) -> u32 {
        self.gpu + self.cpu + self.disk
    }
}

/// The longest prefix of the prompt that a worker of the view has cached.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SharedPrefix {
    /// Its length, in tokens in the GPU.
    pub tokens: u32,
    /// Names it, see [`PrefixCounts`](super::PrefixCounts).
    pub key: Option<NonZeroU64>,
    /// How many requests of the last seconds had the same, each the less the longer ago.
    pub requests: f64,
}

/// One worker's load at the moment of a decision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct State {
    /// False for a worker that must not be chosen.
    pub is_usable: bool,
    /// Requests in flight, of all replicas: those that wait, those whose prompts are computed, and those whose answers are
    /// generated.
    pub requests: u32,
    /// How many requests stand still while a prompt is computed, see [`delayed`].
    pub delayed: f64,
    /// Uncached prompt tokens that the worker has accepted and not computed yet.
    pub queued_tokens: u64,
    /// Prompt tokens of all its requests.
    pub context_tokens: u64,
    /// Answers that its engine generates at the same time.
    pub slots: u32,
    /// Requests that wait inside the engine, as it reports.
    pub waiting: u32,
    /// True if the request is for a LoRA adapter that the worker does not have in its GPU.
    pub lacks_adapter: bool,
    pub speed: Speed,
}

/// For tests alone: a view of a fleet names each field, so that none is forgotten.
#[cfg(test)]
impl Default for State {
    fn default() -> Self {
        Self {
            is_usable: false,
            requests: 0,
            delayed: 0.0,
            queued_tokens: 0,
            context_tokens: 0,
            slots: 256,
            waiting: 0,
            lacks_adapter: false,
            speed: Speed::default(),
        }
    }
}

/// How many requests stand still while a worker computes a prompt, that has so many now and `usual` on average over the last
/// seconds. One that has nothing to do for a moment has the next requests of its sessions soon: half of those that are missing
/// count. With all of them, and over longer times, a fleet that has more to do than it can was used less evenly.
#[inline]
pub fn delayed(requests: u32, usual: f64) -> f64 {
    let now = f64::from(requests);
    now + (usual - now).max(0.0) / 2.0
}

/// The parts of a worker's state that most often rule it out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backlog {
    pub queued_tokens: u64,
    /// Seconds that the worker takes for a prompt token.
    pub prompt_token: f64,
    /// As many requests or more stand still while it computes a prompt.
    pub delayed: f64,
}

/// The candidates of a decision: workers that serve a model, or their dp ranks.
pub trait View {
    fn len(&self) -> usize;

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn indices(&self) -> impl DoubleEndedIterator<Item = ViewIndex> + ExactSizeIterator {
        ViewIndex::range(0..self.len())
    }

    fn state(&self, index: ViewIndex) -> State;

    /// Read without the rest of the state.
    fn backlog(&self, index: ViewIndex) -> Backlog {
        let state = self.state(index);
        Backlog {
            queued_tokens: state.queued_tokens,
            prompt_token: state.speed.prompt_token,
            delayed: state.delayed * (1.0 - state.speed.overlap),
        }
    }

    /// Seconds for a prompt token at the mean rate of the workers.
    fn mean_prompt_token(&self) -> f64;

    /// Prompts that wait at a worker or dp rank, on average over those of the view and the last seconds.
    fn waiting_prompts(&self) -> f64;

    /// A lower bound of the seconds for a prompt token at any worker.
    fn min_prompt_token(&self) -> f64;

    /// A number that is the same for a worker of the same name on every replica.
    fn identity(&self, index: ViewIndex) -> u64;

    /// Whose place this is: a number that all places of one worker share. They are one after the other.
    fn owner(&self, index: ViewIndex) -> usize {
        index.get()
    }

    /// The workers with the longest cached prefixes of the prompt.
    fn prefix_owners(&self) -> &[ViewIndex];

    /// Workers that have the request's LoRA adapter in their GPUs.
    fn adapter_owners(&self) -> &[ViewIndex] {
        &[]
    }

    /// An upper bound of the cached prefix of all other workers, in GPU tokens. The lower it is, the fewer
    /// of them a decision has to look at.
    fn max_cached_elsewhere(&self) -> u32 {
        u32::MAX
    }

    fn cached(&self, index: ViewIndex) -> Cached;

    fn shared_prefix(&self) -> SharedPrefix {
        SharedPrefix::default()
    }
}

/// When a request's tokens are expected, in seconds from the decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Expected {
    pub first_token: f64,
    /// From each token to the next.
    pub token: f64,
}

impl Expected {
    /// The end of an answer of so many tokens.
    pub fn end(&self, tokens: f64) -> f64 {
        self.first_token + (tokens - 1.0).max(0.0) * self.token
    }
}

words! {
    /// Why a worker was chosen.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Reason {
        /// No worker has a longer cached prefix.
        LongestPrefix = "longest_prefix",
        /// Another worker has a longer cached prefix, and its load costs more than the cache hit saves.
        LowerCost = "lower_cost",
        /// No worker has any of the prompt cached: the lowest cost.
        Cold = "cold",
        /// Nearly as cheap as the cheapest worker, and the one that the hash of the prompt's first blocks prefers: while
        /// no other replica is connected.
        PrefixHash = "prefix_hash",
        /// The session affinity key hashes to it.
        Affinity = "affinity",
        /// The workers that the session affinity key prefers have too many requests.
        AffinityOverflow = "affinity_overflow",
        /// The next in turn.
        RoundRobin = "round_robin",
        /// Drawn at random.
        Random = "random",
        /// The fewest requests of the workers compared.
        LeastLoad = "least_load",
    }
}

/// A worker, and why it was chosen. A decider returns the index in its view; the caller, who knows what that index stands for,
/// turns it into the worker's index and the rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision<Index = WorkerIndex> {
    pub index: Index,
    /// The dp rank of the worker, if the request is pinned to one; `None` until the caller has set it.
    pub rank: Option<u32>,
    pub reason: Reason,
    /// Length of its cached prefix, in all tiers.
    pub cached_tokens: u32,
    /// The longest prefix that a worker has ([`SharedPrefix::key`]).
    pub shared: Option<NonZeroU64>,
    /// Tokens to compute; tokens in CPU memory or on disk count in part.
    pub new_tokens: u32,
    /// In seconds.
    pub cost: f64,
    /// When its tokens are expected, if it is sent now.
    pub expected: Expected,
}
