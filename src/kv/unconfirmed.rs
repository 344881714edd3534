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
//!
//! A prompt is touched twice as a whole, when it is inserted and when it is removed; in between it stands in a
//! queue, so that nothing is looked through for what has expired.

mod prefix_key;

use std::collections::VecDeque;
use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use dashmap::DashMap;
use rustc_hash::FxBuildHasher;

pub use self::prefix_key::{PrefixKey, PrefixKeys, prefix_keys};
use super::owner_table::OwnerTable;
use super::prefix_owners::{self, PrefixOwners};
use crate::ids::{BlockHash, WorkerId};
use crate::observe::metrics::metric_table;

/// Blocks of prompts that were sent to a worker and are not confirmed by its KV events yet. They count as cached
/// there, so that requests with the same prefix follow at once.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// How long unconfirmed blocks count as cached after the first token. KV events follow within an engine
    /// step; the default outlives a replay of lost ones.
    pub grace_period: Duration,
    /// KV events that come this long after the first token, or later, show what became of the prompt's blocks: what is not
    /// reported by then does not count any more. As long as events may be behind the answer: SGLang looks for them
    /// every 100 ms.
    pub event_delay: Duration,
    /// How long blocks count as cached that another replica sent to a worker, whose first token this one does not
    /// see: as long as prompts wait and are computed at busy workers. Longer does no harm but for the room, because
    /// confirmed blocks are looked up as well.
    pub peer_lifetime: Duration,
    /// Unconfirmed blocks of all prompts, up to 60 bytes each; what exceeds this does not count as cached.
    pub max_blocks: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            grace_period: Duration::from_secs(3),
            event_delay: Duration::from_millis(250),
            // In simulations of 8 replicas 20 s cost nothing, 10 s 3 % and 3 s 8 % of mean time to first token.
            peer_lifetime: Duration::from_secs(20),
            // 60 MB: 20,000 prompts of 200 blocks at a time.
            max_blocks: 1_000_000,
        }
    }
}

metric_table! {
    #[derive(Clone, Debug)]
    pub struct Metrics {
        prefixes: gauge "warmroute_kv_unconfirmed_prefixes"
            "Prompt prefixes that workers are computing, or have just computed and not reported.",
        rejected: counter "warmroute_kv_unconfirmed_prefixes_rejected_total"
            "Prompt prefixes that were not counted as unconfirmed because of the limit.",
    }
}

/// Parts of the table for each thread that runs at the same time, each with a lock. Each request takes some thirty of these
/// locks twice.
const SHARDS_PER_THREAD: usize = 4;

#[derive(Debug)]
pub struct UnconfirmedBlocks {
    /// With the number of prompts of the worker that have the prefix and count.
    prefixes: OwnerTable,
    /// Prefixes of all prompts.
    count: AtomicU64,
    /// Prompts that are not being computed by a request of this replica, by worker.
    ending: DashMap<WorkerId, Ending, FxBuildHasher>,
    settings: Settings,
    metrics: Metrics,
}

/// A worker's prompts that will not count any more by themselves, oldest first.
#[derive(Debug, Default)]
struct Ending {
    /// With the time of their first token.
    computed: VecDeque<(Instant, Prefixes)>,
    /// With the time at which another replica's choice became known.
    routed: VecDeque<(Instant, Prefixes)>,
}

/// The prefixes of one prompt that were inserted.
type Prefixes = Box<[BlockHash]>;

impl UnconfirmedBlocks {
    pub fn new(settings: Settings, metrics: Metrics) -> Arc<Self> {
        let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
        let shards = (threads * SHARDS_PER_THREAD).next_power_of_two();
        Arc::new(Self {
            prefixes: OwnerTable::new(shards.clamp(64, 1_024)),
            count: AtomicU64::new(0),
            ending: DashMap::default(),
            settings,
            metrics,
        })
    }

    /// Counts a prompt's prefixes as cached by the worker that was chosen for it.
    pub fn insert(self: &Arc<Self>, worker: WorkerId, keys: &PrefixKeys) -> UnconfirmedPrompt {
        let paths = keys.iter().map(|key| key.path);
        UnconfirmedPrompt {
            blocks: self.clone(),
            worker,
            prefixes: self.insert_all(worker, paths),
        }
    }

    /// Counts prefixes as cached by a worker that another replica chose for them: given from the shortest on, as the
    /// path hashes of a prompt's [`PrefixKeys`].
    pub fn insert_routed(&self, now: Instant, worker: WorkerId, paths: &[u64]) {
        let paths = paths.iter().map(|path| BlockHash(*path));
        let prefixes = self.insert_all(worker, paths);
        if prefixes.is_empty() {
            return;
        }
        let mut ending = self.ending.entry(worker).or_default();
        ending.routed.push_back((now, prefixes));
    }

    /// Up to `limit` workers that will have cached the longest prefixes, the longest first. Among many workers with the same
    /// prefix `seed` picks.
    pub fn overlap(&self, keys: &[PrefixKey], limit: usize, seed: u64) -> PrefixOwners {
        let owner_count = |key: &PrefixKey| self.prefixes.read(key.path, <[_]>::len);
        let longest =
            |end: usize, count| keys[..end].partition_point(|key| owner_count(key) > count);
        prefix_owners::search(keys.len(), limit, longest, |prefix, found| {
            let key = keys[prefix];
            self.prefixes.read(key.path, |owners| {
                let start = (seed % owners.len().max(1) as u64) as usize;
                for owner in owners[start..].iter().chain(&owners[..start]) {
                    found.add(owner.worker, key.blocks);
                }
            });
        })
    }

    /// Asks for the memory of prefixes that will be looked up and inserted.
    pub fn prefetch(&self, keys: &[PrefixKey]) {
        for key in keys {
            self.prefixes.prefetch(key.path);
        }
    }

    /// Forgets what a worker and its dp ranks have computed: its process was restarted. Requests that it was still
    /// computing fail, and remove their own prefixes.
    pub fn forget(&self, worker: WorkerId) {
        let mut lost = Vec::new();
        self.ending.retain(|owner, ending| {
            let is_lost = owner.worker() == worker;
            if is_lost {
                lost.push((*owner, std::mem::take(ending)));
            }
            !is_lost
        });
        for (owner, Ending { computed, routed }) in lost {
            for (_, prefixes) in computed.into_iter().chain(routed) {
                self.remove_all(owner, &prefixes);
            }
        }
    }

    /// Removes prompts whose grace period has ended and those that the events of their workers have passed. `applied` says
    /// when a worker's last KV events were applied to its tree, if that counts in routing. To be called often.
    pub fn remove_ended(&self, now: Instant, applied: impl Fn(WorkerId) -> Option<Instant>) {
        let Settings {
            grace_period,
            event_delay,
            peer_lifetime,
            ..
        } = self.settings;
        let mut ended = Vec::new();
        self.ending.retain(|worker, ending| {
            let applied = applied(*worker);
            let is_reported = |since| applied.is_some_and(|applied| applied >= since + event_delay);
            while let Some((_, prefixes)) = ending
                .computed
                .pop_front_if(|(since, _)| now >= *since + grace_period || is_reported(*since))
            {
                ended.push((*worker, prefixes));
            }
            while let Some((_, prefixes)) = ending
                .routed
                .pop_front_if(|(since, _)| now >= *since + peer_lifetime)
            {
                ended.push((*worker, prefixes));
            }
            !(ending.computed.is_empty() && ending.routed.is_empty())
        });
        for (worker, prefixes) in ended {
            self.remove_all(worker, &prefixes);
        }
    }

    /// Inserts as many of a prompt's prefixes as there is room for, from the shortest on. Returns these.
    fn insert_all(
        &self,
        worker: WorkerId,
        paths: impl ExactSizeIterator<Item = BlockHash>,
    ) -> Prefixes {
        let prefixes = paths.len();
        let room = self.reserve(prefixes);
        if room < prefixes {
            self.metrics.rejected.inc_by((prefixes - room) as u64);
        }
        self.metrics.prefixes.add(room as i64);
        let count = |prompts: Option<u32>| Some(prompts.unwrap_or(0) + 1);
        let inserted = paths.take(room);
        inserted
            .inspect(|path| self.prefixes.update(worker, *path, count))
            .collect()
    }

    /// Counts up to so many further prefixes, at once because all threads share the count. Returns for how many there is
    /// room.
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

    fn remove_all(&self, worker: WorkerId, prefixes: &[BlockHash]) {
        for path in prefixes {
            self.prefixes.prefetch(*path);
        }
        for path in prefixes {
            let count = |prompts: Option<u32>| Some(prompts? - 1).filter(|left| *left > 0);
            self.prefixes.update(worker, *path, count);
        }
        self.count.fetch_sub(prefixes.len() as u64, Relaxed);
        self.metrics.prefixes.sub(prefixes.len() as i64);
    }
}

/// A prompt that a worker is computing. Dropping it before the first token removes its prefixes.
#[must_use = "dropping it says that the worker does not compute the prompt"]
#[derive(Debug)]
pub struct UnconfirmedPrompt {
    blocks: Arc<UnconfirmedBlocks>,
    worker: WorkerId,
    prefixes: Prefixes,
}

impl UnconfirmedPrompt {
    /// The prompt is computed; KV events of its blocks are under way.
    pub fn on_first_token(mut self, now: Instant) {
        let prefixes = std::mem::take(&mut self.prefixes);
        let mut ending = self.blocks.ending.entry(self.worker).or_default();
        ending.computed.push_back((now, prefixes));
    }
}

impl Drop for UnconfirmedPrompt {
    fn drop(&mut self) {
        if !self.prefixes.is_empty() {
            self.blocks.remove_all(self.worker, &self.prefixes);
        }
    }
}

#[cfg(test)]
mod tests;
