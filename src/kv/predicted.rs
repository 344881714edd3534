//! What workers without KV events probably have cached: the prompts the router sent there, in the order
//! of use, limited by the size of the engine's cache and by age.
//!
//! One LRU for each worker decides what is kept. It drops the ends of prompts first, so a worker that
//! owns a block owns all blocks before it. A map over all workers says who owns a block. Because of
//! that order the length of a worker's cached prefix is a binary search, without a walk along the
//! prompt.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use dashmap::DashMap;
use hashlink::LinkedHashMap;
use parking_lot::Mutex;
use prometheus::{IntCounter, IntGauge};
use rustc_hash::FxBuildHasher;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::prefix_owners::{self, PrefixOwners};
use crate::ids::{Block, BlockHash, WorkerId};
use crate::observe::metrics::Registry;
use crate::units::{DurationText, SizeText};

/// Prediction of what workers have cached from the prompts that this router sent them: for workers without KV
/// events and prompts without token ids.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Bytes of text that make a token, on average.
    #[schemars(range(min = 0.01))]
    pub bytes_per_token: f64,
    /// Tokens that fit into a worker's prefix cache, for engines whose metrics do not say. 400,000 is about what
    /// an 80 GB GPU has left beside an 8B model.
    #[schemars(range(min = 1))]
    pub tokens_per_worker: u64,
    /// Length of a prompt's first blocks as text. 64 bytes are about 16 tokens of English, the usual block of an
    /// engine.
    #[serde(with = "SizeText")]
    #[schemars(extend("min" = "16B", "max" = "8KiB"))]
    pub block_size: u32,
    /// A prompt that was not sent again for this long no longer counts as cached.
    #[serde(with = "DurationText")]
    #[schemars(extend("min" = "0s"))]
    pub max_age: Duration,
    /// Blocks of all workers, about 120 bytes each: 240 MB, or 2,000 long conversations on each of 10 workers.
    #[schemars(range(min = 1))]
    pub max_blocks: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            bytes_per_token: 4.0,
            tokens_per_worker: 400_000,
            block_size: 64,
            max_age: Duration::from_secs(3_600),
            max_blocks: 2_000_000,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Metrics {
    blocks: IntGauge,
    capacity: IntCounter,
    memory: IntCounter,
    age: IntCounter,
    gone: IntCounter,
    retracted: IntCounter,
}

impl Metrics {
    pub fn new(registry: &Registry) -> Self {
        let evicted = registry.counters(
            "warmroute_predicted_evicted_blocks_total",
            "Blocks no longer predicted to be cached, by reason: the worker's cache is full \
             (worker_capacity), the router's limit (router_memory), age, the worker restarted or left \
             (worker_gone), or it did not accept the request (request_not_accepted).",
            &["reason"],
        );
        let of = |reason| evicted.with_label_values(&[reason]);
        Self {
            blocks: registry.gauge(
                "warmroute_predicted_blocks",
                "Prompt blocks that workers are predicted to have cached.",
            ),
            capacity: of("worker_capacity"),
            memory: of("router_memory"),
            age: of("age"),
            gone: of("worker_gone"),
            retracted: of("request_not_accepted"),
        }
    }
}

/// The predicted blocks of all workers and models.
#[derive(Debug)]
pub struct PredictedIndex {
    /// The workers that own a block, sorted.
    owners: DashMap<BlockHash, SmallVec<[WorkerId; 4]>, FxBuildHasher>,
    lrus: DashMap<WorkerId, Arc<Mutex<WorkerLru>>, FxBuildHasher>,
    /// The length of `lrus`: asking the map for it would take all of its locks.
    lru_count: AtomicUsize,
    settings: Settings,
    metrics: Metrics,
    created: Instant,
}

/// One worker's blocks, least recently used first.
#[derive(Debug, Default)]
struct WorkerLru {
    blocks: LinkedHashMap<BlockHash, Entry, FxBuildHasher>,
    tokens: u64,
    /// Tokens of all prompts so far: the clock of use, which stands still while nothing is used.
    used_tokens: u64,
    /// The worker left the fleet; nothing more is recorded.
    is_closed: bool,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    tokens: u32,
    /// Seconds since `created` at the last use.
    used_s: u32,
    /// The LRU's `used_tokens` at the last use.
    used_at: u64,
}

impl PredictedIndex {
    pub fn new(settings: Settings, metrics: Metrics, now: Instant) -> Self {
        Self {
            owners: DashMap::default(),
            lrus: DashMap::default(),
            lru_count: AtomicUsize::new(0),
            settings,
            metrics,
            created: now,
        }
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Up to `limit` workers with the longest cached prefixes, the longest first. Among many workers with
    /// the same prefix `seed` picks.
    pub fn overlap(&self, prompt: &[Block], limit: usize, seed: u64) -> PrefixOwners {
        let longest = |end, count| partition(end, |block| self.owner_count(prompt[block]) > count);
        prefix_owners::search(prompt.len(), limit, longest, |last, found| {
            let Some(owners) = self.owners.get(&prompt[last].path) else {
                return;
            };
            let start = (seed % owners.len().max(1) as u64) as usize;
            for worker in owners[start..].iter().chain(&owners[..start]) {
                found.add(*worker, last as u32 + 1);
            }
        })
    }

    /// How many of a prompt's first blocks one worker has cached.
    pub fn depth(&self, worker: WorkerId, prompt: &[Block]) -> u32 {
        let is_cached = |block: Block| {
            self.owners
                .get(&block.path)
                .is_some_and(|owners| owners.binary_search(&worker).is_ok())
        };
        partition(prompt.len(), |block| is_cached(prompt[block])) as u32
    }

    /// Counts a prompt as cached by a worker and used now. `capacity_tokens` is the size of the engine's
    /// cache, 0 if unknown. Returns how many of the prompt's first blocks counted as cached before.
    pub fn record(
        &self,
        now: Instant,
        worker: WorkerId,
        capacity_tokens: u64,
        prompt: &[Block],
    ) -> usize {
        let lru = self.lru(worker);
        let used_s = self.seconds(now);
        let capacity_tokens = if capacity_tokens == 0 {
            self.settings.tokens_per_worker
        } else {
            capacity_tokens
        };
        // The part of a prompt beyond the cache's size must not evict everything else.
        let fitting =
            prompt.partition_point(|block| u64::from(block.end_tokens) <= capacity_tokens);
        let prompt = &prompt[..fitting];
        let lru = &mut *lru.lock();
        if lru.is_closed || self.is_fresh(lru, prompt, used_s, capacity_tokens) {
            return prompt.len();
        }
        let mut cached_before = 0;
        lru.used_tokens += prompt.last().map_or(0, |last| u64::from(last.end_tokens));
        let used_at = lru.used_tokens;
        // From the end to the start, so that the end is the least recently used.
        for (position, block) in prompt.iter().enumerate().rev() {
            match lru.blocks.to_back(&block.path) {
                Some(entry) => {
                    cached_before = cached_before.max(position + 1);
                    entry.used_s = used_s;
                    entry.used_at = used_at;
                }
                None => {
                    let before = position
                        .checked_sub(1)
                        .map_or(0, |last| prompt[last].end_tokens);
                    let tokens = block.end_tokens - before;
                    lru.tokens += u64::from(tokens);
                    lru.blocks.insert(
                        block.path,
                        Entry {
                            tokens,
                            used_s,
                            used_at,
                        },
                    );
                    self.metrics.blocks.inc();
                    let mut owners = self.owners.entry(block.path).or_default();
                    if let Err(position) = owners.binary_search(&worker) {
                        owners.insert(position, worker);
                    }
                }
            }
        }
        self.evict(lru, worker, capacity_tokens, used_s);
        cached_before
    }

    /// Takes back the blocks after `cached_before` that a record added: the worker did not accept the
    /// request. Another request recorded meanwhile with the same blocks loses them too, which makes the
    /// prediction colder, not wrong.
    pub fn retract(&self, worker: WorkerId, prompt: &[Block], cached_before: usize) {
        let Some(lru) = self.lrus.get(&worker).map(|lru| lru.clone()) else {
            return;
        };
        let lru = &mut *lru.lock();
        for block in prompt.get(cached_before..).unwrap_or_default() {
            if self.remove(lru, worker, block.path) {
                self.metrics.retracted.inc();
            }
        }
    }

    /// Forgets all blocks of a worker: its process was restarted.
    pub fn forget(&self, worker: WorkerId) {
        if let Some(lru) = self.lrus.get(&worker).map(|lru| lru.clone()) {
            self.clear(&mut lru.lock(), worker);
        }
    }

    /// Drops workers that left the fleet, and blocks that were not used for long. To be called now and
    /// then: a request only cleans up the worker that it goes to.
    pub fn remove_expired(&self, now: Instant, is_listed: impl Fn(WorkerId) -> bool) {
        let lrus: Vec<(WorkerId, Arc<Mutex<WorkerLru>>)> = self
            .lrus
            .iter()
            .map(|lru| (*lru.key(), lru.value().clone()))
            .collect();
        for (worker, lru) in lrus {
            let lru = &mut *lru.lock();
            if is_listed(worker) {
                self.evict(lru, worker, u64::MAX, self.seconds(now));
            } else {
                self.clear(lru, worker);
                lru.is_closed = true;
                if self.lrus.remove(&worker).is_some() {
                    self.lru_count.fetch_sub(1, Relaxed);
                }
            }
        }
    }

    /// Blocks and tokens that a worker is predicted to have cached.
    pub fn size(&self, worker: WorkerId) -> (usize, u64) {
        self.lrus.get(&worker).map_or((0, 0), |lru| {
            let lru = lru.lock();
            (lru.blocks.len(), lru.tokens)
        })
    }

    /// Whether the whole prompt is cached and was used so recently that its place in the order of use
    /// would hardly change. A repeated prompt then costs one lookup.
    fn is_fresh(
        &self,
        lru: &WorkerLru,
        prompt: &[Block],
        now_s: u32,
        capacity_tokens: u64,
    ) -> bool {
        const FRESH: u64 = 64;
        let Some(entry) = prompt.last().and_then(|last| lru.blocks.get(&last.path)) else {
            return false;
        };
        let age_s = now_s.saturating_sub(entry.used_s);
        lru.used_tokens - entry.used_at < capacity_tokens / FRESH
            && u64::from(age_s) <= self.settings.max_age.as_secs() / FRESH
    }

    fn lru(&self, worker: WorkerId) -> Arc<Mutex<WorkerLru>> {
        if let Some(lru) = self.lrus.get(&worker) {
            return lru.clone();
        }
        let new = || {
            self.lru_count.fetch_add(1, Relaxed);
            Arc::default()
        };
        self.lrus.entry(worker).or_insert_with(new).clone()
    }

    /// Drops the least recently used blocks beyond the limits: the end of a prompt before its start.
    fn evict(&self, lru: &mut WorkerLru, worker: WorkerId, capacity_tokens: u64, now_s: u32) {
        let share = self.settings.max_blocks / self.lru_count.load(Relaxed).max(1) as u64;
        let blocks_max = share.max(1) as usize;
        let old_s = now_s.saturating_sub(self.settings.max_age.as_secs() as u32);
        while let Some((path, entry)) = lru.blocks.front().map(|(path, entry)| (*path, *entry)) {
            let reason = if lru.tokens > capacity_tokens {
                &self.metrics.capacity
            } else if lru.blocks.len() > blocks_max {
                &self.metrics.memory
            } else if entry.used_s < old_s {
                &self.metrics.age
            } else {
                break;
            };
            self.remove(lru, worker, path);
            reason.inc();
        }
    }

    /// The caller holds the LRU's lock throughout, so that no record comes between the LRU and `owners`.
    fn clear(&self, lru: &mut WorkerLru, worker: WorkerId) {
        self.metrics.gone.inc_by(lru.blocks.len() as u64);
        while let Some(path) = lru.blocks.front().map(|(path, _)| *path) {
            self.remove(lru, worker, path);
        }
    }

    fn remove(&self, lru: &mut WorkerLru, worker: WorkerId, path: BlockHash) -> bool {
        let Some(entry) = lru.blocks.remove(&path) else {
            return false;
        };
        lru.tokens -= u64::from(entry.tokens);
        self.remove_owner(path, worker);
        self.metrics.blocks.dec();
        true
    }

    fn remove_owner(&self, path: BlockHash, worker: WorkerId) {
        let dashmap::Entry::Occupied(mut owners) = self.owners.entry(path) else {
            return;
        };
        if let Ok(position) = owners.get().binary_search(&worker) {
            owners.get_mut().remove(position);
        }
        if owners.get().is_empty() {
            owners.remove();
        }
    }

    fn owner_count(&self, block: Block) -> usize {
        self.owners
            .get(&block.path)
            .map_or(0, |owners| owners.len())
    }

    fn seconds(&self, now: Instant) -> u32 {
        now.saturating_duration_since(self.created)
            .min(Duration::from_secs(u64::from(u32::MAX)))
            .as_secs() as u32
    }
}

/// The first index of `0..end` for which `is_cached` is false, given that it is true before and false
/// after.
fn partition(end: usize, is_cached: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, end);
    // A repeated prompt is cached as a whole, so try its end first.
    if high > 0 && is_cached(high - 1) {
        return high;
    }
    while low < high {
        let middle = low + (high - low) / 2;
        if is_cached(middle) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

#[cfg(test)]
mod tests;
