//! The answer of `/explain`.

use serde::Serialize;

use crate::fleet::load::LoadShare;
use crate::http::circuit_breaker;
use crate::kv::subscriber::TreeState;
use crate::relay::prompt::cached_prefix::PrefixSource;
use crate::relay::request::target::TargetReason;
use crate::routing::cost::Terms;
use crate::routing::{Cached, Policy, Reason};

#[derive(Debug, Default, Serialize)]
pub struct Explanation {
    /// The model that would get the request.
    pub model: String,
    /// How the requested name led to it, if the configuration says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<NameExplained>,
    pub policy: Policy,
    pub prompt_tokens: u32,
    /// What its answer is expected to have, from the model's earlier answers and the request's own limit.
    pub answer_tokens: u64,
    /// Prompts that wait at a worker of the model, or at a dp rank, on average over all of them and the last seconds. This one delays
    /// three that come later for each.
    pub waiting_prompts: f64,
    /// Requests of the last seconds with the same longest cached prefix. The more, the less the delay counts of computing that prefix
    /// at one more worker.
    pub shared_requests: f64,
    pub prompt_blocks: usize,
    /// False if the prompt is looked up by its text, because its tokens are not known.
    pub tokens_known: bool,
    /// Why the router cannot tokenize the request, if its model has a tokenizer in the router.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_unknown_reason: Option<String>,
    /// The tokens themselves, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<Tokens>,
    /// The chosen worker.
    pub chosen: Option<String>,
    /// The dp rank of it that the request would be pinned to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chosen_rank: Option<u32>,
    pub reason: Option<Reason>,
    /// The reason as a sentence.
    pub explanation: Option<String>,
    /// How many workers take such requests. `workers` has all of them, or of a recorded decision the cheapest and the
    /// most expensive ones, the chosen one, and the one with the longest cached prefix.
    pub candidates: usize,
    pub workers: Vec<Score>,
    /// The choice of a prefill worker, if requests are disaggregated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disaggregation: Option<DisaggregationExplained>,
    /// Whether the request would wait for a worker with room, if requests may.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue: Option<QueueExplained>,
    /// Workers of the model that take no requests now.
    pub excluded: Vec<Excluded>,
}

/// A name with aliases, targets or fallbacks.
#[derive(Debug, Serialize)]
pub struct NameExplained {
    pub requested: String,
    pub reason: TargetReason,
    pub targets: Vec<CandidateModel>,
    pub fallback: Vec<CandidateModel>,
}

#[derive(Debug, Serialize)]
pub struct CandidateModel {
    pub model: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    /// Whether a worker of it can take requests now.
    pub is_usable: bool,
}

/// The choice of a prefill worker, or why there is none.
#[derive(Debug, Serialize)]
pub struct DisaggregationExplained {
    pub is_disaggregated: bool,
    pub not_disaggregated_reason: Option<&'static str>,
    /// The chosen prefill worker.
    pub prefill: Option<String>,
    /// The dp rank of it that the prefill leg would be pinned to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_rank: Option<u32>,
    pub reason: Option<Reason>,
    /// The reason as a sentence.
    pub explanation: String,
    /// How many prefill workers there are, of which a recorded decision has some in `workers`.
    pub candidates: usize,
    pub workers: Vec<Score>,
}

/// Whether a request would wait for a worker with room, and behind what.
#[derive(Debug, Serialize)]
pub struct QueueExplained {
    pub would_wait: bool,
    /// `room` at a worker that is busy, or a `worker` that serves the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<&'static str>,
    /// Then it is refused.
    pub max_wait_ms: u128,
    /// As of the tenant that was named, or of a client without one.
    pub priority: i32,
    pub class: String,
    /// Requests of the model that wait now.
    pub waiting: u32,
    /// A worker with this many prompt tokens to compute for each of its dp ranks is busy.
    pub max_worker_queued_tokens: u64,
}

/// A prompt as the router tokenizes it, to compare it with an engine's.
#[derive(Debug, Serialize)]
pub struct Tokens {
    pub ids: Vec<u32>,
    /// Their text, if the model's tokenizer is configured.
    pub text: Option<String>,
    /// Bytes of text after these tokens whose ids are not known, because an image precedes them.
    pub unknown_bytes: usize,
}

/// One worker or one of its dp ranks, as a decision sees it.
#[derive(Debug, Serialize)]
pub struct Score {
    pub worker: String,
    /// What clients see in place of a name that is the address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_name: Option<String>,
    /// The dp rank, if requests are pinned to it. Then what is cached and the load are its own; what is pinned to none, here or
    /// by other replicas, and requests of other clients count in equal parts at each rank. `load.foreign_requests` is the
    /// worker's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    pub is_usable: bool,
    pub unusable_reason: Option<String>,
    pub circuit_breaker: circuit_breaker::State,
    /// Requests in flight, and those that wait for the worker here and in other replicas. Tokens count likewise; `load` is
    /// without those that wait.
    pub requests: u32,
    /// Requests in flight at its worker on average over the last seconds: half of what is missing now counts as delayed.
    pub usual_requests: f64,
    pub queued_tokens: u64,
    pub context_tokens: u64,
    /// Answers that its engine generates at the same time.
    pub slots: u32,
    /// Requests that wait inside the engine, as it reports.
    pub waiting: u32,
    pub speed: SpeedExplained,
    /// Whose the load is.
    pub load: LoadShares,
    /// The cached prefix by tier.
    pub cached: Cached,
    /// Length of the cached prefix in all tiers.
    pub cached_tokens: u32,
    /// Where the knowledge of the cached prefix comes from.
    pub known_by: PrefixSource,
    /// The state of each dp rank's tree, from its KV events. Empty for a worker without KV events.
    pub trees: Vec<Tree>,
    /// False while its engine's tokens differ from the router's: then its KV events do not count.
    pub is_trusted: bool,
    /// Tokens to compute; tokens in CPU memory or on disk count in part.
    pub new_tokens: u32,
    /// What the request costs here: its own time, and what it takes from others.
    pub cost_ms: f64,
    pub cost_terms_ms: Terms,
    /// When its first token is expected, from now.
    pub expected_first_token_ms: f64,
    /// When an answer of the usual length is expected to end, from now.
    pub expected_end_ms: f64,
}

/// How fast a worker is, as learnt or configured.
#[derive(Debug, Default, Serialize)]
pub struct SpeedExplained {
    pub prompt_tokens_per_second: u64,
    /// A step of its engine as the worker is now, with a token of each answer.
    pub step_ms: f64,
    /// From how many observations its own speed was learnt; one with few counts as those alike.
    pub samples: u64,
}

/// A worker's load by who has it there.
#[derive(Debug, Default, Serialize)]
pub struct LoadShares {
    pub own: LoadShare,
    /// Other replicas of the router.
    pub peers: LoadShare,
    /// Requests of others that the engine reports.
    pub foreign_requests: u32,
}

/// The tree of one dp rank.
#[derive(Debug, Serialize)]
pub struct Tree {
    #[serde(flatten)]
    pub state: TreeState,
    /// True if the tree counts in decisions: a partial or a live one does.
    pub scores: bool,
    pub cached: Cached,
}

#[derive(Debug, Serialize)]
pub struct Excluded {
    pub worker: String,
    pub reason: &'static str,
}
