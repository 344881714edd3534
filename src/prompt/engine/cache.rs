//! Caches the token ids that engines returned, by the fields of a request that determine its prompt.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hashlink::LinkedHashMap;
use rustc_hash::FxBuildHasher;
use xxhash_rust::xxh3::Xxh3;

use crate::json_scan::Scan;
use crate::prompt::types::Api;

/// Fields that do not change the prompt. Requests that differ only in these share an entry. Sorted.
pub(super) const IGNORED_FIELDS: &[&str] = &[
    "cache_salt",
    "frequency_penalty",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
    "metadata",
    "min_p",
    "n",
    "presence_penalty",
    "priority",
    "prompt_cache_key",
    "request_id",
    "safety_identifier",
    "seed",
    "session_id",
    "stop",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "top_k",
    "top_p",
    "user",
];

/// An LRU cache bounded in bytes. Entries expire.
#[derive(Debug, Default)]
pub(super) struct ResponseCache {
    /// Least recently used first.
    pub(super) entries: LinkedHashMap<u128, (Instant, Arc<[u32]>), FxBuildHasher>,
    pub(super) bytes: u64,
}

/// Memory of an entry in addition to its ids.
const ENTRY_BYTES: u64 = 100;

fn bytes_of(ids: &[u32]) -> u64 {
    size_of_val(ids) as u64 + ENTRY_BYTES
}

impl ResponseCache {
    pub(super) fn get(&mut self, key: u128, now: Instant, ttl: Duration) -> Option<Arc<[u32]>> {
        let (created, ids) = self.entries.to_back(&key)?;
        if now.saturating_duration_since(*created) <= ttl {
            return Some(ids.clone());
        }
        self.bytes -= bytes_of(ids);
        self.entries.remove(&key);
        None
    }

    pub(super) fn put(&mut self, key: u128, now: Instant, ids: Arc<[u32]>, max_bytes: u64) {
        let bytes = bytes_of(&ids);
        if bytes > max_bytes {
            return;
        }
        self.bytes += bytes;
        if let Some((_, old)) = self.entries.insert(key, (now, ids)) {
            self.bytes -= bytes_of(&old);
        }
        while self.bytes > max_bytes {
            let Some((_, (_, oldest))) = self.entries.pop_front() else {
                break;
            };
            self.bytes -= bytes_of(&oldest);
        }
    }
}

/// A hash of everything in a request that determines its prompt. `seed` is random for each process, so that no client
/// can prepare bodies with the same hash.
pub(super) fn key(seed: u64, model: &str, api: Api, body: &[u8]) -> u128 {
    let mut hasher = Xxh3::with_seed(seed);
    hasher.update(model.as_bytes());
    hasher.update(&[0xff, api as u8]);
    // In their order.
    let read = Scan::<true>::of_bytes(body).and_then(|scan| {
        scan.whole_object(|name, value| {
            if IGNORED_FIELDS.binary_search(&&*name).is_err() {
                hasher.update(name.as_bytes());
                hasher.update(&[0xff]);
                hasher.update(value.as_bytes());
                hasher.update(&[0xff]);
            }
        })
    });
    if read.is_none() {
        hasher.update(body);
    }
    hasher.digest128()
}
