//! Prompts that one engine computes and another one answers: what this engine has to give, and what is counted of it.
//!
//! It does what vLLM 0.32's NIXL and Mooncake connectors were seen to do, where that shows outside. Blocks go from process to process
//! over HTTP, by `POST /sim/blocks` at the address where the prefill engine takes requests, so that a killed one shows. What a real decode
//! engine does not notice is made visible here: blocks of another prompt, or asked for twice or too late, give an answer of
//! [`tokenizer::wrong`](super::tokenizer::wrong) words, and are counted by both engines.

mod blocks;
mod fetch;
mod grant;
mod params;
mod settings;

use std::sync::Arc;

use hashlink::LruCache;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use xxhash_rust::xxh3::xxh3_64_with_seed;

pub(crate) use self::blocks::{blocks, bootstrap_page, release};
pub(crate) use self::fetch::{Received, give_up, receive};
pub(crate) use self::grant::Grant;
pub(crate) use self::params::{Asked, Handed, Leg};
pub use self::settings::{Connector, Role, Settings};
use super::driver::Driver;
use crate::sim::engine::RequestKey;

/// TransferStats that are remembered, so that a second use can be told from a name that never was.
const OFFERS_MAX: usize = 65_536;

/// What an engine has seen of handoffs. All but `pinned` and `pinned_blocks` only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransferStats {
    /// Requests whose blocks wait to be fetched; how many blocks, and the most ever.
    pub pinned: usize,
    pub pinned_blocks: usize,
    pub pinned_blocks_peak: u64,
    /// Requests that came to be computed for another engine, or to be answered with another's blocks.
    pub prefill_legs: u64,
    pub decode_legs: u64,
    /// Of these, the ones that ended before their answer did: the client left, or a fault switch did it.
    pub aborted_prefill_legs: u64,
    pub aborted_decode_legs: u64,
    /// Prompts whose blocks another engine may fetch, and those that one has.
    pub granted: u64,
    pub fetched: u64,
    /// Those that were freed because nobody came in time, or because the decode engine refused its request.
    pub expired: u64,
    pub released: u64,
    /// Prompts that this engine received, and tokens of them that it did not have.
    pub received: u64,
    pub received_tokens: u64,
    /// Transfers that failed here.
    pub failed_transfers: u64,
    /// Parameters used twice, after their time, or with another prompt: wrong text, and status 200. Both
    /// engines count.
    pub wrong_uses: u64,
    /// Requests with parameters for another role than this engine's.
    pub wrong_role: u64,
}

#[derive(Debug)]
pub(crate) struct State {
    counts: Mutex<TransferStats>,
    offers: Mutex<LruCache<String, Offer>>,
    /// Rung when there is a new offer.
    offered: Notify,
}

/// Blocks that may be fetched once, by the name of the request or of the transfer.
#[derive(Clone, Debug)]
struct Offer {
    driver: Arc<Driver>,
    key: RequestKey,
    /// Of the prompt they are for.
    fingerprint: u64,
    is_used: bool,
}

/// What becomes of blocks that are asked for.
#[derive(Debug)]
enum Verdict {
    Right(Offer),
    /// They are not, or no more, what is asked for. A real engine would not notice.
    Wrong(&'static str),
    Unknown,
}

impl Default for State {
    fn default() -> Self {
        Self {
            counts: Mutex::default(),
            offers: Mutex::new(LruCache::new(OFFERS_MAX)),
            offered: Notify::new(),
        }
    }
}

impl State {
    pub(crate) fn count(&self, count: impl FnOnce(&mut TransferStats)) {
        count(&mut self.counts.lock());
    }

    /// Without what the engines count themselves.
    pub(crate) fn counts(&self) -> TransferStats {
        *self.counts.lock()
    }

    fn offer(&self, name: String, offer: Offer) {
        self.offers.lock().insert(name, offer);
        self.count(|counts| counts.granted += 1);
        self.offered.notify_waiters();
    }

    /// Looks for blocks; right ones cannot be asked for again.
    fn take(&self, name: &str, fingerprint: u64) -> Verdict {
        let mut offers = self.offers.lock();
        let Some(offer) = offers.get_mut(name) else {
            return Verdict::Unknown;
        };
        if offer.is_used {
            return Verdict::Wrong("used before");
        }
        offer.is_used = true;
        if offer.driver.kept_blocks(offer.key).is_none() {
            Verdict::Wrong("after its time")
        } else if offer.fingerprint != fingerprint {
            // They are read and freed all the same.
            offer.driver.release_kept(offer.key);
            Verdict::Wrong("another prompt")
        } else {
            Verdict::Right(offer.clone())
        }
    }
}

/// Tells prompts apart.
fn fingerprint(prompt: &[u32], salt: u64) -> u64 {
    let bytes: Vec<u8> = prompt.iter().flat_map(|it| it.to_le_bytes()).collect();
    xxh3_64_with_seed(&bytes, salt)
}
