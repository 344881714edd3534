//! The requests that a prefill engine answers for decode engines and routers: fetch blocks, release blocks, and the
//! bootstrap query.

use std::io;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::settings::Connector;
use super::state::{Lookup, Offer, State};
use crate::sim::worker::shared::Shared;

pub(super) const BLOCKS: &str = "/sim/blocks";
pub(super) const RELEASE: &str = "/sim/release";

/// A decode engine's request for the blocks of a prompt.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct BlockRequest {
    pub(super) engine_id: String,
    /// The name of the request (NIXL) or the transfer id (Mooncake).
    pub(super) name: String,
    pub(super) fingerprint: u64,
    /// Prompt tokens that the decode engine does not have cached.
    pub(super) missing_tokens: usize,
}

/// Transfers blocks, which takes as long as the transfer. If it is dropped before, the blocks stay pinned. An error
/// closes the connection.
pub(crate) async fn fetch(shared: &Shared, body: &[u8]) -> io::Result<Value> {
    let request: BlockRequest = serde_json::from_slice(body)?;
    let connector = shared.settings.transfer.connector;
    let connector = connector.ok_or_else(|| io::Error::other("no KV connector"))?;
    if !shared.ranks.engine_ids().any(|id| id == request.engine_id) {
        return Err(io::Error::other("unknown engine id"));
    }
    let offer = match (
        find(&shared.transfers, connector, &request).await,
        connector,
    ) {
        (Lookup::Found(offer), _) => offer,
        (Lookup::OtherPrompt, _) | (_, Connector::Nixl | Connector::Moriio) => {
            shared.transfers.count(|stats| stats.wrong_uses += 1);
            return Ok(json!({"right": false}));
        }
        (Lookup::Stale | Lookup::Unknown, Connector::Mooncake) => {
            // The transfer id is no longer valid, and the decode engine waits for an answer in vain.
            shared.transfers.count(|stats| stats.wrong_uses += 1);
            return std::future::pending().await;
        }
    };
    let settings = &shared.settings.transfer;
    tokio::time::sleep(settings.transfer_time(request.missing_tokens)).await;
    offer.driver.release_kept(offer.key);
    shared.transfers.count(|stats| stats.fetched += 1);
    Ok(json!({"right": true}))
}

/// With Mooncake, the request for the blocks may come before the one that computes them.
async fn find(state: &State, connector: Connector, request: &BlockRequest) -> Lookup {
    loop {
        let offered = state.offered.notified();
        let mut offered = std::pin::pin!(offered);
        // From here on no notification is missed.
        offered.as_mut().enable();
        match (state.take(&request.name, request.fingerprint), connector) {
            (Lookup::Unknown, Connector::Mooncake) => offered.await,
            (found, _) => return found,
        }
    }
}

/// Frees blocks whose decode leg was rejected by the decode engine.
pub(crate) fn release(shared: &Shared, body: &[u8]) {
    let Ok(request) = serde_json::from_slice::<BlockRequest>(body) else {
        return;
    };
    let mut offers = shared.transfers.offers.lock();
    if let Some(offer) = offers.get_mut(&request.name)
        && !offer.is_used
    {
        offer.is_used = true;
        let Offer { driver, key, .. } = offer.clone();
        drop(offers);
        if driver.release_kept(key) {
            shared.transfers.count(|stats| stats.released += 1);
        }
    }
}

/// The answer of Mooncake's bootstrap server (`GET /query`): engine id and block address by dp rank.
pub(crate) fn bootstrap_page(shared: &Shared) -> Value {
    let addr = shared.addr;
    let rank = |(rank, id): (usize, &str)| {
        let entry = json!({"engine_id": id, "worker_addr": {"0": {"0": format!("tcp://{addr}")}}});
        (rank.to_string(), entry)
    };
    let page: Map<String, Value> = shared.ranks.engine_ids().enumerate().map(rank).collect();
    Value::Object(page)
}
