//! The offers of a prefill engine's blocks, and the statistics of KV transfers.

use std::sync::Arc;

use hashlink::LruCache;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::sim::engine::RequestKey;
use crate::sim::worker::driver::Driver;

/// Offers that are remembered, to distinguish a second use from an unknown name.
const MAX_OFFERS: usize = 65_536;

/// Statistics of an engine's KV transfers. All but `pinned` and `pinned_blocks` only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransferStats {
    /// Requests whose blocks wait to be fetched, the number of these blocks, and its peak.
    pub pinned: usize,
    pub pinned_blocks: usize,
    pub pinned_blocks_peak: u64,
    /// Requests with the parameters of a prefill leg or of a decode leg.
    pub prefill_legs: u64,
    pub decode_legs: u64,
    /// Legs that ended before their answer did: the client disconnected, or a fault ended them.
    pub aborted_prefill_legs: u64,
    pub aborted_decode_legs: u64,
    /// Prompts whose blocks were offered to a decode engine, and those that were fetched.
    pub granted: u64,
    pub fetched: u64,
    /// Offers that were freed because no engine fetched them in time, or because the decode engine rejected its request.
    pub expired: u64,
    pub released: u64,
    /// Prompts that this engine received, and their tokens that it did not have cached.
    pub received: u64,
    pub received_tokens: u64,
    /// Transfers that failed here.
    pub failed_transfers: u64,
    /// Parameters used twice, too late, or with another prompt: the answer has status 200 and wrong text. Both engines
    /// count it.
    pub wrong_uses: u64,
    /// Requests with parameters for another role than this engine's.
    pub wrong_role: u64,
}

#[derive(Debug)]
pub(crate) struct State {
    stats: Mutex<TransferStats>,
    pub(super) offers: Mutex<LruCache<String, Offer>>,
    /// Notified when there is a new offer.
    pub(super) offered: Notify,
}

/// Blocks that can be fetched once, under the name of the request (NIXL) or the transfer id (Mooncake).
#[derive(Clone, Debug)]
pub(super) struct Offer {
    pub(super) driver: Arc<Driver>,
    pub(super) key: RequestKey,
    /// The fingerprint of the prompt.
    pub(super) fingerprint: u64,
    pub(super) is_used: bool,
}

/// The result of looking for requested blocks.
#[derive(Debug)]
pub(super) enum Lookup {
    Found(Offer),
    /// The blocks are no longer those of the prompt. A real engine would not notice.
    Stale,
    /// The blocks are those of another prompt. A real engine would not notice.
    OtherPrompt,
    Unknown,
}

impl Default for State {
    fn default() -> Self {
        Self {
            stats: Mutex::default(),
            offers: Mutex::new(LruCache::new(MAX_OFFERS)),
            offered: Notify::new(),
        }
    }
}

impl State {
    pub(crate) fn count(&self, count: impl FnOnce(&mut TransferStats)) {
        count(&mut self.stats.lock());
    }

    /// The statistics, without what the engines count themselves.
    pub(crate) fn stats(&self) -> TransferStats {
        *self.stats.lock()
    }

    pub(super) fn offer(&self, name: String, offer: Offer) {
        self.offers.lock().insert(name, offer);
        self.count(|stats| stats.granted += 1);
        self.offered.notify_waiters();
    }

    /// Looks up an offer, which cannot be taken again.
    pub(super) fn take(&self, name: &str, fingerprint: u64) -> Lookup {
        let mut offers = self.offers.lock();
        let Some(offer) = offers.get_mut(name) else {
            return Lookup::Unknown;
        };
        if offer.is_used {
            return Lookup::Stale;
        }
        offer.is_used = true;
        let is_kept = offer.driver.engine().kept_blocks(offer.key).is_some();
        if !is_kept {
            Lookup::Stale
        } else if offer.fingerprint != fingerprint {
            // They are read and freed nevertheless.
            offer.driver.release_kept(offer.key);
            Lookup::OtherPrompt
        } else {
            Lookup::Found(offer.clone())
        }
    }
}

/// A hash that identifies a prompt.
pub(super) fn fingerprint(prompt: &[u32], salt: u64) -> u64 {
    let bytes: Vec<u8> = prompt
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .collect();
    xxh3_64_with_seed(&bytes, salt)
}
