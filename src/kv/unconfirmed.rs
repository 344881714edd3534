//! Unconfirmed blocks: the prompt blocks that a worker was just sent and has not reported yet.
//!
//! A worker's KV events report a block only once it is computed. Until then the next request with the
//! same prefix must already see it coming, or a burst of such requests would spread over the workers.
//! So a prompt's blocks count as cached from the choice of its worker until the first token, and a
//! grace period longer, for the event to arrive. Workers without KV events need none of this:
//! [`super::predicted`] counts prompts at once.
//!
//! Nothing here waits for a particular event: an early one does no harm, and without one the grace
//! period ends. It ends sooner once the worker's events have gone on after the first token: engines
//! report in order, so what the tree does not have by then was never kept, or is evicted already.

mod prefix_key;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use dashmap::{DashMap, Entry};
use prometheus::{IntCounter, IntGauge};
use rustc_hash::FxBuildHasher;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

pub use self::prefix_key::{PrefixKey, PrefixKeys, prefix_keys};
use super::prefix_owners::{self, PrefixOwners};
use crate::ids::{BlockHash, WorkerId};
use crate::observe::metrics::Registry;
use crate::units::DurationText;

/// Blocks of prompts that were sent to a worker and are not confirmed by its KV events yet. They count as cached
/// there, so that requests with the same prefix follow at once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// How long unconfirmed blocks count as cached after the first token. KV events follow within an engine
    /// step; the default outlives a replay of lost ones.
    #[serde(with = "DurationText")]
    #[schemars(extend("min" = "0s"))]
    pub grace_period: Duration,
    /// KV events that come this long after the first token, or later, show what became of the prompt's blocks: what is not
    /// reported by then does not count any more. As long as events may be behind the answer: SGLang looks for them
    /// every 100 ms.
    #[serde(with = "DurationText")]
    #[schemars(extend("min" = "0s"))]
    pub event_delay: Duration,
    /// How long blocks count as cached that another replica sent to a worker, whose first token this one does not
    /// see: as long as prompts wait and are computed at busy workers. Longer does no harm but for the room, because
    /// confirmed blocks are looked up as well.
    #[serde(with = "DurationText")]
    #[schemars(extend("min" = "0s"))]
    pub peer_lifetime: Duration,
    /// Unconfirmed blocks of all workers, about 60 bytes each; what exceeds this does not count as cached.
    #[schemars(range(min = 1))]
    pub max_blocks: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            grace_period: Duration::from_secs(3),
            event_delay: Duration::from_millis(250),
            // In simulations of 8 replicas 20 s cost nothing, 10 s 3 % and 3 s 8 % of mean time to first token.
            peer_lifetime: Duration::from_secs(20),
            // 60 MB: 5,000 prompts of 200 blocks at a time.
            max_blocks: 1_000_000,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Metrics {
    prefixes: IntGauge,
    rejected: IntCounter,
}

impl Metrics {
    pub fn new(registry: &Registry) -> Self {
        Self {
            prefixes: registry.gauge(
                "warmroute_kv_unconfirmed_prefixes",
                "Prompt prefixes that workers are computing, or have just computed and not reported.",
            ),
            rejected: registry.counter(
                "warmroute_kv_unconfirmed_prefixes_rejected_total",
                "Prompt prefixes that were not counted as unconfirmed because of the limit.",
            ),
        }
    }
}

/// The unconfirmed prefixes of all workers.
#[derive(Debug)]
pub struct UnconfirmedBlocks {
    prefixes: DashMap<BlockHash, Owners, FxBuildHasher>,
    /// Entries of all owners.
    count: AtomicU64,
    settings: Settings,
    metrics: Metrics,
    created: Instant,
}

/// Sorted by worker.
type Owners = SmallVec<[Owner; 2]>;

/// A worker that computes or has computed a prefix.
#[derive(Clone, Copy, Debug)]
struct Owner {
    worker: WorkerId,
    /// Requests that have not computed the prefix yet.
    requests: u32,
    /// Milliseconds since `created`: how long a prefix counts that another replica routed.
    until_ms: u64,
    /// When the prefix was computed last, as far as its request's first token shows; 0: never.
    computed_ms: u64,
}

impl Owner {
    /// A new owner, to which `change` happens at once.
    fn changed(worker: WorkerId, change: impl Fn(&mut Self)) -> Self {
        let mut owner = Self {
            worker,
            requests: 0,
            until_ms: 0,
            computed_ms: 0,
        };
        change(&mut owner);
        owner
    }
}

/// When prefixes are looked up, and how far the events of their owners are.
struct Lookup<'a> {
    now_ms: u64,
    grace_ms: u64,
    delay_ms: u64,
    /// When the last events of a worker were applied to its tree.
    applied_ms: &'a dyn Fn(WorkerId) -> Option<u64>,
}

impl Lookup<'_> {
    fn counts(&self, owner: &Owner) -> bool {
        owner.requests > 0
            || self.now_ms < owner.until_ms
            || (self.is_in_grace(owner) && !self.is_reported(owner))
    }

    fn is_in_grace(&self, owner: &Owner) -> bool {
        owner.computed_ms > 0 && self.now_ms < owner.computed_ms.saturating_add(self.grace_ms)
    }

    /// Whether the worker's tree has the last word.
    fn is_reported(&self, owner: &Owner) -> bool {
        let shown_ms = owner.computed_ms.saturating_add(self.delay_ms);
        (self.applied_ms)(owner.worker).is_some_and(|applied_ms| applied_ms >= shown_ms)
    }
}

impl UnconfirmedBlocks {
    pub fn new(settings: Settings, metrics: Metrics, now: Instant) -> Arc<Self> {
        Arc::new(Self {
            prefixes: DashMap::default(),
            count: AtomicU64::new(0),
            settings,
            metrics,
            created: now,
        })
    }

    /// Counts a prompt's prefixes as cached by the worker that was chosen for it.
    pub fn insert(self: &Arc<Self>, worker: WorkerId, keys: &PrefixKeys) -> UnconfirmedPrompt {
        let paths = keys.iter().map(|key| key.path);
        let inserted = self.update_all(worker, paths, |owner| owner.requests += 1);
        UnconfirmedPrompt {
            blocks: self.clone(),
            worker,
            keys: keys.clone(),
            inserted,
        }
    }

    /// Counts prefixes as cached by a worker that another replica chose for them: given from the shortest on, as the
    /// path hashes of a prompt's [`PrefixKeys`].
    pub fn insert_routed(&self, now: Instant, worker: WorkerId, paths: &[u64]) {
        let until_ms = self.milliseconds(now + self.settings.peer_lifetime);
        let paths = paths.iter().map(|path| BlockHash(*path));
        self.update_all(worker, paths, |owner| {
            owner.until_ms = owner.until_ms.max(until_ms)
        });
    }

    /// Up to `limit` workers that will have cached the longest prefixes, the longest first. `applied` says when a worker's
    /// last KV events were applied to its tree, if that counts in routing.
    pub fn overlap(
        &self,
        now: Instant,
        keys: &[PrefixKey],
        limit: usize,
        applied: impl Fn(WorkerId) -> Option<Instant>,
    ) -> PrefixOwners {
        let applied_ms = |worker| applied(worker).map(|at| self.milliseconds(at));
        let lookup = self.lookup(now, &applied_ms);
        let longest = |end: usize, count| {
            keys[..end].partition_point(|key| self.has_more_owners(&lookup, *key, count))
        };
        prefix_owners::search(keys.len(), limit, longest, |prefix, found| {
            let key = keys[prefix];
            if let Some(owners) = self.prefixes.get(&key.path) {
                let counting = owners.iter().filter(|owner| lookup.counts(owner));
                counting.for_each(|owner| found.add(owner.worker, key.blocks));
            }
        })
    }

    /// How many of a prompt's first blocks one worker will have cached.
    pub fn depth(&self, now: Instant, worker: WorkerId, keys: &[PrefixKey]) -> u32 {
        let lookup = self.lookup(now, &|_| None);
        let depth = keys.partition_point(|key| {
            self.prefixes.get(&key.path).is_some_and(|owners| {
                position_of(&owners, worker).is_ok_and(|position| lookup.counts(&owners[position]))
            })
        });
        depth.checked_sub(1).map_or(0, |last| keys[last].blocks)
    }

    /// Forgets what a worker and its dp ranks have computed: its process was restarted. Requests that it was still
    /// computing fail, and remove their own prefixes.
    pub fn forget(&self, worker: WorkerId) {
        self.retain(|owner| {
            let is_lost = owner.worker.worker() == worker;
            if is_lost {
                (owner.until_ms, owner.computed_ms) = (0, 0);
            }
            !is_lost || owner.requests > 0
        });
    }

    /// Frees prefixes whose grace period has ended. To be called now and then.
    pub fn remove_expired(&self, now: Instant) {
        let lookup = self.lookup(now, &|_| None);
        self.retain(|owner| lookup.counts(owner));
    }

    fn lookup<'a>(
        &self,
        now: Instant,
        applied_ms: &'a dyn Fn(WorkerId) -> Option<u64>,
    ) -> Lookup<'a> {
        Lookup {
            now_ms: self.milliseconds(now),
            grace_ms: self.settings.grace_period.as_millis() as u64,
            delay_ms: self.settings.event_delay.as_millis() as u64,
            applied_ms,
        }
    }

    /// Whether more than `count` workers own a prefix.
    fn has_more_owners(&self, lookup: &Lookup<'_>, key: PrefixKey, count: usize) -> bool {
        self.prefixes.get(&key.path).is_some_and(|owners| {
            let mut counting = owners.iter().filter(|owner| lookup.counts(owner));
            counting.nth(count).is_some()
        })
    }

    /// Changes an owner of each prefix, which is added if there is room. Given from the shortest on: what finds no room
    /// is the end of the prompt. Returns how many were changed.
    fn update_all(
        &self,
        worker: WorkerId,
        paths: impl ExactSizeIterator<Item = BlockHash>,
        change: impl Fn(&mut Owner),
    ) -> usize {
        // Counted once for all, since all threads share the counters.
        let prefixes = paths.len();
        let reserved = self.reserve(prefixes);
        let mut room = reserved;
        let mut changed = 0;
        for path in paths {
            if !self.update(worker, path, &mut room, &change) {
                self.metrics.rejected.inc_by((prefixes - changed) as u64);
                break;
            }
            changed += 1;
        }
        self.count.fetch_sub(room as u64, Relaxed);
        self.metrics.prefixes.add((reserved - room) as i64);
        changed
    }

    /// Counts up to so many further prefixes. Returns for how many there is room.
    fn reserve(&self, prefixes: usize) -> usize {
        let prefixes = prefixes as u64;
        let before = self.count.fetch_add(prefixes, Relaxed);
        let room = self.settings.max_blocks.saturating_sub(before);
        let reserved = room.min(prefixes);
        if reserved < prefixes {
            self.count.fetch_sub(prefixes - reserved, Relaxed);
        }
        reserved as usize
    }

    /// Changes an owner of a prefix, which is added if there is room. False if there is none.
    fn update(
        &self,
        worker: WorkerId,
        path: BlockHash,
        room: &mut usize,
        change: impl Fn(&mut Owner),
    ) -> bool {
        match self.prefixes.entry(path) {
            Entry::Occupied(mut entry) => {
                let owners = entry.get_mut();
                match position_of(owners, worker) {
                    Ok(known) => change(&mut owners[known]),
                    Err(_) if *room == 0 => return false,
                    Err(position) => {
                        *room -= 1;
                        owners.insert(position, Owner::changed(worker, change));
                    }
                }
            }
            Entry::Vacant(_) if *room == 0 => return false,
            Entry::Vacant(entry) => {
                *room -= 1;
                entry.insert(SmallVec::from_iter([Owner::changed(worker, change)]));
            }
        }
        true
    }

    /// One request less computes this prefix. `computed_ms` is 0 if it was not computed. Whether the owner was removed.
    fn release(&self, worker: WorkerId, path: BlockHash, computed_ms: u64) -> bool {
        let Entry::Occupied(mut owners) = self.prefixes.entry(path) else {
            return false;
        };
        let Ok(position) = position_of(owners.get(), worker) else {
            return false;
        };
        let owner = &mut owners.get_mut()[position];
        owner.requests = owner.requests.saturating_sub(1);
        owner.computed_ms = owner.computed_ms.max(computed_ms);
        if owner.requests > 0 || owner.until_ms > 0 || owner.computed_ms > 0 {
            return false;
        }
        owners.get_mut().remove(position);
        if owners.get().is_empty() {
            owners.remove();
        }
        true
    }

    fn retain(&self, keep: impl Fn(&mut Owner) -> bool) {
        let mut removed = 0;
        self.prefixes.retain(|_, owners| {
            let before = owners.len();
            owners.retain(&keep);
            removed += before - owners.len();
            !owners.is_empty()
        });
        self.subtract(removed);
    }

    fn subtract(&self, prefixes: usize) {
        self.count.fetch_sub(prefixes as u64, Relaxed);
        self.metrics.prefixes.sub(prefixes as i64);
    }

    /// From 1 on: 0 stands for what has not happened.
    fn milliseconds(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.created).as_millis() as u64 + 1
    }
}

/// The worker's position among the owners, or where it would be inserted.
fn position_of(owners: &Owners, worker: WorkerId) -> Result<usize, usize> {
    owners.binary_search_by_key(&worker, |owner| owner.worker)
}

/// A prompt that a worker is computing. Dropping it before the first token removes its prefixes.
#[must_use = "dropping it says that the worker does not compute the prompt"]
#[derive(Debug)]
pub struct UnconfirmedPrompt {
    blocks: Arc<UnconfirmedBlocks>,
    worker: WorkerId,
    keys: PrefixKeys,
    /// How many of the keys were inserted and are not released yet.
    inserted: usize,
}

impl UnconfirmedPrompt {
    /// The prompt is computed; KV events of its blocks are under way.
    pub fn on_first_token(mut self, now: Instant) {
        self.release(self.blocks.milliseconds(now));
    }

    fn release(&mut self, computed_ms: u64) {
        let mut removed = 0;
        for key in &self.keys[..std::mem::take(&mut self.inserted)] {
            let is_removed = self.blocks.release(self.worker, key.path, computed_ms);
            removed += usize::from(is_removed);
        }
        if removed > 0 {
            self.blocks.subtract(removed);
        }
    }
}

impl Drop for UnconfirmedPrompt {
    fn drop(&mut self) {
        self.release(0);
    }
}

#[cfg(test)]
mod tests;
