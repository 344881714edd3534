//! Requests that are pinned to one of a worker's dp ranks: which ones, and whose cache a rank's is. Pure.

use super::settings::PinRanks;
use crate::fleet::kv_transfer::Connector;
use crate::fleet::{PinnedApi, Worker};
use crate::ids::WorkerId;
use crate::prompt::Api;

/// How requests of an API are pinned to a rank, if they may be. Not where requests have two legs.
pub(super) fn api_of(
    pin_ranks: PinRanks,
    connector: Option<Connector>,
    api: Api,
) -> Option<PinnedApi> {
    if pin_ranks == PinRanks::Never || connector.is_some() {
        return None;
    }
    match api {
        Api::Chat | Api::Completions | Api::Messages => Some(PinnedApi::Chat),
        Api::Responses => Some(PinnedApi::Responses),
        Api::Embeddings
        | Api::Rerank
        | Api::Tokenize
        | Api::Detokenize
        | Api::CountTokens
        | Api::Other => None,
    }
}

/// Whose cache a worker's is in predictions, or that of one of its ranks.
pub(super) fn cache_owner(worker: &Worker, rank: Option<u32>) -> WorkerId {
    let rank = rank.and_then(|rank| worker.id.at_rank(rank));
    rank.unwrap_or(worker.id)
}
