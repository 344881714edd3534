//! What workers without KV events probably have cached: the prompts that this router and its peers sent there, in the
//! order of use, limited by the size of the engine's cache and by age.
//!
//! One LRU for each worker decides what is kept. It drops the ends of prompts first, so a worker that
//! owns a block owns all blocks before it. A map over all workers says who owns a block. Because of
//! that order the length of a worker's cached prefix is a binary search, without a walk along the
//! prompt.

mod copy;
mod lru;
mod metrics;
mod peers;
mod settings;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicUsize};
use std::time::{Duration, Instant};

use dashmap::DashMap;
use parking_lot::Mutex;
use rustc_hash::FxBuildHasher;
use smallvec::SmallVec;

pub use self::copy::PredictedBlock;
use self::lru::{Slot, Use, WorkerLru};
pub use self::metrics::Metrics;
pub use self::peers::{Placed, RoutedBlocks};
pub use self::settings::Settings;
use super::owner_table::OwnerTable;
use super::prefix_owners::{self, PrefixOwners};
use crate::ids::{Block, BlockHash, WorkerId};

#[derive(Debug)]
pub struct PredictedIndex {
    /// With each block's place in its owner's LRU, which only the holder of the LRU's lock reads or writes.
    owners: OwnerTable,
    lrus: DashMap<WorkerId, Arc<Mutex<WorkerLru>>, FxBuildHasher>,
    /// The length of `lrus`: asking the map for it would take all of its locks.
    lru_count: AtomicUsize,
    /// Paths that were shared with the other replicas in this second or before must be sent to them whole, because
    /// some of them may have missed it.
    resend_s: AtomicU32,
    settings: Settings,
    metrics: Metrics,
    created: Instant,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// How many of the prompt's first blocks counted as cached before.
    pub cached_blocks: usize,
    /// The blocks to announce to other replicas: the new ones, or the whole path if they may not know what is
    /// before it. Empty, at the prompt's end, if they need to know only that it was used. `None` if it was used just
    /// before.
    pub news: Option<std::ops::Range<usize>>,
}

/// A path that was not sent whole for this long is sent whole with its next use, for a replica that has evicted a part
/// of it earlier than the others.
const RESEND_AFTER_S: u32 = 600;
/// Parts of the table of owners, each with a lock.
const SHARDS: usize = 64;
/// Blocks that are dropped at a time: their entries are asked for together.
const EVICTED_TOGETHER: usize = 32;
/// Dp ranks of a worker.
const RANKS_MAX: u32 = 64;
/// So long after a worker's restart every replica has noticed it, and has forgotten its blocks.
const RESTART_NOTICED_S: u32 = 30;

impl PredictedIndex {
    pub fn new(settings: Settings, metrics: Metrics, now: Instant) -> Self {
        // As `seconds` counts. What is shared in the first second is sent whole again.
        let start_s = u32::try_from(settings.max_age.as_secs()).unwrap_or(u32::MAX);
        Self {
            owners: OwnerTable::new(SHARDS),
            lrus: DashMap::default(),
            lru_count: AtomicUsize::new(0),
            settings,
            metrics,
            resend_s: AtomicU32::new(start_s),
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
            self.owners.read(prompt[last].path, |owners| {
                let start = (seed % owners.len().max(1) as u64) as usize;
                for owner in owners[start..].iter().chain(&owners[..start]) {
                    found.add(owner.worker, last as u32 + 1);
                }
            });
        })
    }

    /// How many of a prompt's first blocks one worker has cached.
    pub fn depth(&self, worker: WorkerId, prompt: &[Block]) -> u32 {
        let is_cached = |block: usize| self.slot(worker, prompt[block].path).is_some();
        partition(prompt.len(), is_cached) as u32
    }

    /// Counts a prompt as cached by a worker and used now. `capacity_tokens` is the size of the engine's
    /// cache, 0 if unknown.
    pub fn record(
        &self,
        now: Instant,
        worker: WorkerId,
        capacity_tokens: u64,
        prompt: &[Block],
    ) -> Recorded {
        let now_s = self.seconds(now);
        let capacity_tokens = self.capacity(capacity_tokens);
        // The part of a prompt beyond the cache's size must not evict everything else.
        let fitting =
            prompt.partition_point(|block| u64::from(block.end_tokens) <= capacity_tokens);
        let prompt = &prompt[..fitting];
        let lru = self.lru(worker);
        let lru = &mut *lru.lock();
        let cached_blocks = self.depth(worker, prompt) as usize;
        let last_cached = cached_blocks
            .checked_sub(1)
            .and_then(|last| self.slot(worker, prompt[last].path));
        let is_whole = cached_blocks == fitting;
        if lru.is_closed
            || fitting == 0
            || is_whole && self.is_fresh(lru, last_cached, now_s, capacity_tokens)
        {
            return Recorded {
                cached_blocks: fitting,
                news: None,
            };
        }
        let shared_s = last_cached
            .map(|slot| lru.node(slot).used.shared_s)
            .filter(|shared_s| !self.must_resend(lru, *shared_s, now_s));
        let used = self.next_use(lru, prompt[fitting - 1].end_tokens, now_s, shared_s);
        let mut before = match cached_blocks {
            0 => 0,
            cached => prompt[cached - 1].end_tokens,
        };
        let new = prompt[cached_blocks..].iter().map(move |block| {
            let tokens = block.end_tokens.saturating_sub(before);
            before = block.end_tokens;
            (block.path, tokens)
        });
        self.extend(lru, worker, last_cached, new, used);
        self.evict(lru, worker, capacity_tokens, now_s);
        let start = if shared_s.is_some() { cached_blocks } else { 0 };
        Recorded {
            cached_blocks,
            news: Some(start..fitting),
        }
    }

    /// Takes back the blocks after `cached_before` that a record added: the worker did not accept the
    /// request. Another request recorded meanwhile with the same blocks loses them too, unless it went on after them,
    /// which makes the prediction colder, not wrong.
    pub fn retract(&self, worker: WorkerId, prompt: &[Block], cached_before: usize) {
        let Some(lru) = self.lrus.get(&worker).map(|lru| lru.clone()) else {
            return;
        };
        let lru = &mut *lru.lock();
        let added = prompt.get(cached_before..).unwrap_or_default();
        for block in added.iter().rev() {
            match self.slot(worker, block.path) {
                // Another prompt goes on after this block, so it keeps this block and all before it.
                Some(slot) if lru.has_children(slot) => break,
                Some(slot) => {
                    self.remove(lru, worker, slot);
                    self.metrics.retracted.inc();
                }
                None => {}
            }
        }
    }

    /// Forgets all blocks of a worker and of its dp ranks: its process was restarted.
    pub fn forget(&self, now: Instant, worker: WorkerId) {
        self.forget_cache(now, worker, &self.lru(worker));
        for rank in self.ranks_of(worker) {
            self.forget_cache(now, rank, &self.lru(rank));
        }
    }

    fn forget_cache(&self, now: Instant, owner: WorkerId, lru: &Mutex<WorkerLru>) {
        let lru = &mut *lru.lock();
        self.clear(lru, owner);
        lru.resend_at_s = self.seconds(now).saturating_add(RESTART_NOTICED_S);
    }

    /// The dp ranks of a worker of which a cache is predicted.
    fn ranks_of(&self, worker: WorkerId) -> impl Iterator<Item = WorkerId> {
        // Ranks are numbered from 0, but the first prompt may go to any.
        let ranks = (0..RANKS_MAX).filter_map(move |rank| worker.at_rank(rank));
        ranks.filter(|rank| self.lrus.contains_key(rank))
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
            if is_listed(worker.worker()) {
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

    /// Blocks and tokens that a worker is predicted to have cached, its dp ranks together.
    pub fn size(&self, worker: WorkerId) -> (usize, u64) {
        let all = std::iter::once(worker).chain(self.ranks_of(worker));
        // Out of the map before it is locked: a worker that leaves is removed from the map with its LRU locked.
        all.filter_map(|owner| self.lrus.get(&owner).map(|lru| lru.clone()))
            .fold((0, 0), |(blocks, tokens), lru| {
                let lru = lru.lock();
                (blocks + lru.len, tokens + lru.tokens)
            })
    }

    /// Adds blocks after a path, and counts all of it as used. The first block of a prompt becomes the most recently
    /// used one, and its last one the least of them.
    fn extend(
        &self,
        lru: &mut WorkerLru,
        worker: WorkerId,
        path: Option<Slot>,
        new: impl Iterator<Item = (BlockHash, u32)> + Clone,
        used: Use,
    ) {
        let (mut parent, mut newer) = (path, None);
        let mut added = 0;
        for (path, _) in new.clone() {
            self.owners.prefetch(path);
        }
        for (path, tokens) in new {
            let insert = || lru.insert(path, tokens, parent, newer, used).0;
            let Some(slot) = self.owners.insert(worker, path, insert).map(Slot) else {
                // Two paths with one hash.
                break;
            };
            (parent, newer) = (Some(slot), Some(slot));
            added += 1;
        }
        self.metrics.blocks.add(added);
        if let Some(path) = path {
            lru.touch_path(path, used);
        }
    }

    /// A use of a path with so many tokens. It is shared now unless `shared_s` says when it was.
    fn next_use(&self, lru: &mut WorkerLru, tokens: u32, now_s: u32, shared_s: Option<u32>) -> Use {
        lru.used_tokens += u64::from(tokens);
        Use {
            at_s: now_s,
            at_tokens: lru.used_tokens,
            shared_s: shared_s.unwrap_or(now_s),
        }
    }

    /// Whether a prompt's last block was used so recently that its place in the order of use would hardly change. A
    /// repeated prompt then costs one lookup.
    fn is_fresh(
        &self,
        lru: &WorkerLru,
        last: Option<Slot>,
        now_s: u32,
        capacity_tokens: u64,
    ) -> bool {
        const FRESH: u64 = 64;
        let Some(last) = last else {
            return false;
        };
        let used = lru.node(last).used;
        let age_s = now_s.saturating_sub(used.at_s);
        lru.used_tokens - used.at_tokens < capacity_tokens / FRESH
            && u64::from(age_s) <= self.settings.max_age.as_secs() / FRESH
    }

    /// Whether a path that was shared in a second may have been missed by a replica.
    fn must_resend(&self, lru: &WorkerLru, shared_s: u32, now_s: u32) -> bool {
        let missed_restart = lru.resend_at_s <= now_s && shared_s <= lru.resend_at_s;
        missed_restart
            || shared_s <= self.resend_s.load(Relaxed)
            || now_s.saturating_sub(shared_s) > RESEND_AFTER_S
    }

    fn capacity(&self, reported_tokens: u64) -> u64 {
        match reported_tokens {
            0 => self.settings.tokens_per_worker,
            reported => reported,
        }
    }

    fn slot(&self, worker: WorkerId, path: BlockHash) -> Option<Slot> {
        self.owners.value(worker, path).map(Slot)
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
        let (mut capacity, mut memory, mut age) = (0, 0, 0);
        loop {
            let surplus = lru.surplus(capacity_tokens, blocks_max);
            let surplus: SmallVec<[Slot; EVICTED_TOGETHER]> =
                surplus.take(EVICTED_TOGETHER).collect();
            if surplus.is_empty() {
                break;
            }
            for slot in &surplus {
                self.owners.prefetch(lru.node(*slot).path);
            }
            for slot in surplus {
                if lru.tokens > capacity_tokens {
                    capacity += 1;
                } else {
                    memory += 1;
                }
                self.owners.remove(worker, lru.remove(slot).path);
            }
        }
        let old_s = now_s.saturating_sub(self.settings.max_age.as_secs() as u32);
        let is_old = |lru: &WorkerLru, slot: &Slot| lru.node(*slot).used.at_s < old_s;
        while let Some(oldest) = lru.oldest().filter(|slot| is_old(lru, slot)) {
            self.owners.remove(worker, lru.remove(oldest).path);
            age += 1;
        }
        if capacity + memory + age > 0 {
            self.metrics.blocks.sub((capacity + memory + age) as i64);
            self.metrics.capacity.inc_by(capacity);
            self.metrics.memory.inc_by(memory);
            self.metrics.age.inc_by(age);
        }
    }

    /// The caller holds the LRU's lock throughout, so that no record comes between the LRU and `owners`.
    fn clear(&self, lru: &mut WorkerLru, worker: WorkerId) {
        self.metrics.gone.inc_by(lru.len as u64);
        while let Some(oldest) = lru.oldest() {
            self.remove(lru, worker, oldest);
        }
        lru.shrink();
    }

    fn remove(&self, lru: &mut WorkerLru, worker: WorkerId, slot: Slot) {
        self.owners.remove(worker, lru.remove(slot).path);
        self.metrics.blocks.dec();
    }

    fn owner_count(&self, block: Block) -> usize {
        self.owners.read(block.path, <[_]>::len)
    }

    /// Counted from before the start, because another replica's blocks may be as old as that.
    fn seconds(&self, now: Instant) -> u32 {
        now.saturating_duration_since(self.created)
            .saturating_add(self.settings.max_age)
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
