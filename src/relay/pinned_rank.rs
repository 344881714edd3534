//! Which requests are pinned to one of a worker's dp ranks. Pure.

use super::settings::PinRanks;
use crate::fleet::PinnedApi;
use crate::fleet::kv_transfer::Connector;
use crate::prompt::Api;

/// How requests of an API are pinned to a rank, if they may be. Of a request with two legs, both are. MoRI-IO's workers have
/// one rank each.
pub(super) fn api_of(
    pin_ranks: PinRanks,
    connector: Option<Connector>,
    api: Api,
) -> Option<PinnedApi> {
    if pin_ranks == PinRanks::Never || connector == Some(Connector::Moriio) {
        return None;
    }
    match api {
        Api::Chat | Api::Completions | Api::Messages | Api::Generate => Some(PinnedApi::Chat),
        Api::Responses => Some(PinnedApi::Responses),
        Api::Embeddings
        | Api::Rerank
        | Api::Tokenize
        | Api::Detokenize
        | Api::CountTokens
        | Api::Other => None,
    }
}
