//! What a prefill engine is asked by decode engines and routers: for its blocks, to free them, and who it is.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{Connector, Offer, State, Verdict};
use crate::sim::worker::Shared;

pub(super) const BLOCKS: &str = "/sim/blocks";
pub(super) const RELEASE: &str = "/sim/release";

/// One engine asks another for blocks.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Wanted {
    pub(super) engine_id: String,
    /// Of the request or the transfer.
    pub(super) name: String,
    pub(super) fingerprint: u64,
    /// What is not there already.
    pub(super) missing_tokens: usize,
}

/// Something without an answer: the connection is to be dropped.
#[derive(Debug)]
pub(crate) struct Unanswered;

/// The blocks are on their way for as long as this takes. Dropped before, they stay pinned.
pub(crate) async fn blocks(shared: &Shared, body: &[u8]) -> Result<String, Unanswered> {
    let wanted: Wanted = serde_json::from_slice(body).map_err(|_| Unanswered)?;
    let connector = shared.settings.transfer.connector.ok_or(Unanswered)?;
    if !shared.ranks.engine_ids().any(|id| id == wanted.engine_id) {
        return Err(Unanswered);
    }
    let offer = match (find(&shared.transfers, connector, &wanted).await, connector) {
        (Verdict::Right(offer), _) => offer,
        (Verdict::Wrong("another prompt"), _) | (_, Connector::Nixl) => {
            shared.transfers.count(|counts| counts.wrong_uses += 1);
            return Ok(json!({"right": false}).to_string());
        }
        (Verdict::Wrong(_) | Verdict::Unknown, Connector::Mooncake) => {
            // The name means nothing any more, and the decode engine waits for it.
            shared.transfers.count(|counts| counts.wrong_uses += 1);
            return std::future::pending().await;
        }
    };
    let settings = &shared.settings.transfer;
    tokio::time::sleep(settings.transfer_time(wanted.missing_tokens)).await;
    offer.driver.release_kept(offer.key);
    shared.transfers.count(|counts| counts.fetched += 1);
    Ok(json!({"right": true}).to_string())
}

/// With Mooncake, the request for the blocks may come before the one that computes them.
async fn find(state: &State, connector: Connector, wanted: &Wanted) -> Verdict {
    loop {
        let offered = state.offered.notified();
        let mut offered = std::pin::pin!(offered);
        // From here on no offer is missed.
        offered.as_mut().enable();
        match (state.take(&wanted.name, wanted.fingerprint), connector) {
            (Verdict::Unknown, Connector::Mooncake) => offered.await,
            (verdict, _) => return verdict,
        }
    }
}

/// The decode engine has refused its request and says so; frees the blocks.
pub(crate) fn release(shared: &Shared, body: &[u8]) {
    let Ok(wanted) = serde_json::from_slice::<Wanted>(body) else {
        return;
    };
    let mut offers = shared.transfers.offers.lock();
    if let Some(offer) = offers.get_mut(&wanted.name)
        && !offer.is_used
    {
        offer.is_used = true;
        let Offer { driver, key, .. } = offer.clone();
        drop(offers);
        if driver.release_kept(key) {
            shared.transfers.count(|counts| counts.released += 1);
        }
    }
}

/// Mooncake's answer to `GET /query`: by data-parallel rank, who it is and where its blocks are.
pub(crate) fn bootstrap_page(shared: &Shared) -> String {
    let addr = shared.addr;
    let rank = |(rank, id): (usize, &str)| {
        let entry = json!({"engine_id": id, "worker_addr": {"0": {"0": format!("tcp://{addr}")}}});
        (rank.to_string(), entry)
    };
    let page: Map<String, Value> = shared.ranks.engine_ids().enumerate().map(rank).collect();
    Value::Object(page).to_string()
}
