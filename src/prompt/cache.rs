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

/// Locks, each over its share of the pieces and the bytes: a carrier seldom waits for another.
const SHARDS: usize = 32;
/// What a piece takes beside its text and ids: keys, links, the allocations' own.
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
    known: IntCounter,
    new: IntCounter,
    forgotten: IntCounter,
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
            known: looked_up.with_label_values(&["hit"]),
            new: looked_up.with_label_values(&["miss"]),
            forgotten: registry.counter(
                "warmroute_tokenizer_cache_evicted_bytes_total",
                "Bytes evicted from the tokenizer cache.",
            ),
        }
    }
}

/// Which vocabulary an id belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VocabularyId(pub u32);

#[derive(Debug)]
pub struct Cache {
    shards: Box<[Mutex<Shard>]>,
    shard_bytes_max: usize,
    /// Of this process: nobody can prepare texts that share a hash.
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
            shard_bytes_max: bytes_max / SHARDS,
            seed,
            metrics,
        }
    }

    /// Appends a piece's ids, where they are known.
    pub fn get(&self, vocabulary: VocabularyId, text: &str, ids: &mut Vec<u32>) -> bool {
        let hash = self.hash(vocabulary, text);
        let mut shard = self.shard(hash).lock();
        let is_known = match shard.pieces.to_back(&hash) {
            Some(piece) if piece.vocabulary == vocabulary && *piece.text == *text => {
                ids.extend_from_slice(&piece.ids);
                true
            }
            _ => false,
        };
        drop(shard);
        let counter = match is_known {
            true => &self.metrics.known,
            false => &self.metrics.new,
        };
        counter.inc_by(text.len() as u64);
        is_known
    }

    pub fn put(&self, vocabulary: VocabularyId, text: &str, ids: &[u32]) {
        let piece = Piece {
            vocabulary,
            text: text.into(),
            ids: ids.into(),
        };
        let bytes = piece.bytes();
        if bytes > self.shard_bytes_max {
            return;
        }
        let hash = self.hash(vocabulary, text);
        let mut forgotten = 0;
        let mut shard = self.shard(hash).lock();
        shard.bytes += bytes;
        let mut replaced = 0;
        if let Some(old) = shard.pieces.insert(hash, piece) {
            replaced = old.bytes();
            shard.bytes -= replaced;
        }
        while shard.bytes > self.shard_bytes_max {
            let Some((_, oldest)) = shard.pieces.pop_front() else {
                break;
            };
            shard.bytes -= oldest.bytes();
            forgotten += oldest.bytes();
        }
        drop(shard);
        let grown = bytes as i64 - replaced as i64 - forgotten as i64;
        self.metrics.bytes.add(grown);
        self.metrics.forgotten.inc_by(forgotten as u64);
    }

    pub fn memory_bytes(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().bytes).sum()
    }

    fn hash(&self, vocabulary: VocabularyId, text: &str) -> u64 {
        xxh3_64_with_seed(text.as_bytes(), self.seed ^ u64::from(vocabulary.0))
    }

    fn shard(&self, hash: u64) -> &Mutex<Shard> {
        // The map's own hasher uses the low bits.
        &self.shards[(hash >> 32) as usize % SHARDS]
    }
}

#[cfg(test)]
mod tests;
