//! A cache from pieces of text to their token ids, so that the next turn of a conversation tokenizes only new text.
//!
//! Keyed by piece and not by prefix: the ids of a piece depend on nothing around it (`vocabulary::boundaries`), so
//! a system prompt or a tool description is found wherever it occurs. The text itself is stored and compared:
//! a hash collision must not produce wrong ids, since ids may be sent to an engine. Bounded in bytes, LRU.

use hashlink::LinkedHashMap;
use parking_lot::Mutex;
use prometheus::{IntCounter, IntGauge};
use rustc_hash::FxBuildHasher;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::observe::metrics::Registry;
use crate::units::SizeText;

/// Number of shards. Each has its own lock and an equal part of the memory, so that I/O threads rarely wait.
const SHARDS: usize = 32;
/// Memory of an entry in addition to its text and ids: key, links, allocator overhead.
const ENTRY_BYTES: usize = 120;

/// The cache of tokenised texts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Memory of the cache of texts and their token ids, of all models: about two bytes for one of text, so
    /// 128 MiB are 100 conversations of 100,000 tokens. 0 turns the cache off.
    #[serde(with = "SizeText")]
    #[schemars(extend("min" = "0"))]
    pub max_cache_memory: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_cache_memory: 128 << 20,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Metrics {
    bytes: IntGauge,
    hit_bytes: IntCounter,
    miss_bytes: IntCounter,
    evicted_bytes: IntCounter,
}

impl Metrics {
    pub fn new(registry: &Registry) -> Self {
        let looked_up = registry.counters(
            "warmroute_tokenizer_cache_lookup_bytes_total",
            "Bytes of prompt text looked up in the tokenizer cache, by result.",
            &["result"],
        );
        Self {
            bytes: registry.gauge(
                "warmroute_tokenizer_cache_bytes",
                "Size of the tokenizer cache: texts and their token ids.",
            ),
            hit_bytes: looked_up.with_label_values(&["hit"]),
            miss_bytes: looked_up.with_label_values(&["miss"]),
            evicted_bytes: registry.counter(
                "warmroute_tokenizer_cache_evicted_bytes_total",
                "Bytes evicted from the tokenizer cache.",
            ),
        }
    }
}

/// Identifies a vocabulary, so that models with different tokenizers can share the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VocabularyId(pub u32);

/// Token ids by piece of text, of all models.
#[derive(Debug)]
pub struct Cache {
    shards: Box<[Mutex<Shard>]>,
    max_shard_bytes: usize,
    /// Random for each process, so that no client can prepare texts with the same hash.
    seed: u64,
    metrics: Metrics,
}

#[derive(Debug, Default)]
struct Shard {
    /// Least recently used first.
    pieces: LinkedHashMap<u64, Piece, FxBuildHasher>,
    bytes: usize,
}

#[derive(Debug)]
struct Piece {
    vocabulary: VocabularyId,
    text: Box<str>,
    ids: Box<[u32]>,
}

impl Piece {
    fn bytes(&self) -> usize {
        self.text.len() + size_of_val(&*self.ids) + ENTRY_BYTES
    }
}

impl Cache {
    pub fn new(settings: &Settings, seed: u64, metrics: Metrics) -> Self {
        let bytes_max = usize::try_from(settings.max_cache_memory).unwrap_or(usize::MAX);
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            max_shard_bytes: bytes_max / SHARDS,
            seed,
            metrics,
        }
    }

    /// Appends the cached ids of a piece to `ids`. Returns false if the piece is not cached.
    pub fn get(&self, vocabulary: VocabularyId, text: &str, ids: &mut Vec<u32>) -> bool {
        let hash = self.hash(vocabulary, text);
        let mut shard = self.shard(hash).lock();
        let is_hit = match shard.pieces.to_back(&hash) {
            Some(piece) if piece.vocabulary == vocabulary && *piece.text == *text => {
                ids.extend_from_slice(&piece.ids);
                true
            }
            _ => false,
        };
        drop(shard);
        let counter = if is_hit {
            &self.metrics.hit_bytes
        } else {
            &self.metrics.miss_bytes
        };
        counter.inc_by(text.len() as u64);
        is_hit
    }

    pub fn put(&self, vocabulary: VocabularyId, text: &str, ids: &[u32]) {
        let piece = Piece {
            vocabulary,
            text: text.into(),
            ids: ids.into(),
        };
        let bytes = piece.bytes();
        if bytes > self.max_shard_bytes {
            return;
        }
        let hash = self.hash(vocabulary, text);
        let mut evicted = 0;
        let mut shard = self.shard(hash).lock();
        shard.bytes += bytes;
        let mut replaced = 0;
        if let Some(old) = shard.pieces.insert(hash, piece) {
            replaced = old.bytes();
            shard.bytes -= replaced;
        }
        while shard.bytes > self.max_shard_bytes {
            let Some((_, oldest)) = shard.pieces.pop_front() else {
                break;
            };
            shard.bytes -= oldest.bytes();
            evicted += oldest.bytes();
        }
        drop(shard);
        let grown = bytes as i64 - replaced as i64 - evicted as i64;
        self.metrics.bytes.add(grown);
        self.metrics.evicted_bytes.inc_by(evicted as u64);
    }

    pub fn memory_bytes(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().bytes).sum()
    }

    fn hash(&self, vocabulary: VocabularyId, text: &str) -> u64 {
        xxh3_64_with_seed(text.as_bytes(), self.seed ^ u64::from(vocabulary.0))
    }

    fn shard(&self, hash: u64) -> &Mutex<Shard> {
        // The map uses the low bits of the hash.
        &self.shards[(hash >> 32) as usize % SHARDS]
    }
}

#[cfg(test)]
mod tests;
