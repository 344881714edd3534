//! The memory that all shards use together, and which shard has the least recently used record.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use super::settings::Settings;

/// The tick of a shard without evictable records.
const NOTHING: u64 = u64::MAX;

/// Counters shared by the shards. Each shard changes them under its own lock.
#[derive(Debug, Default)]
pub(super) struct Capacity {
    bytes: AtomicU64,
    records: AtomicU64,
    running_bytes: AtomicU64,
    running_records: AtomicU64,
    pub(super) max: Settings,
    /// Incremented by each use of a record.
    tick: AtomicU64,
    /// The tick of the least recently used evictable record of each shard.
    oldest: Box<[AtomicU64]>,
}

/// The memory that one record uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cost {
    pub(super) bytes: u64,
    pub(super) runs: bool,
}

impl Capacity {
    pub(super) fn new(settings: &Settings, shards: usize) -> Self {
        Self {
            max: settings.clone(),
            oldest: (0..shards).map(|_| AtomicU64::new(NOTHING)).collect(),
            ..Self::default()
        }
    }

    pub(super) fn take(&self, cost: Cost) {
        self.bytes.fetch_add(cost.bytes, Relaxed);
        self.records.fetch_add(1, Relaxed);
        if cost.runs {
            self.running_bytes.fetch_add(cost.bytes, Relaxed);
            self.running_records.fetch_add(1, Relaxed);
        }
    }

    pub(super) fn give_back(&self, cost: Cost) {
        self.bytes.fetch_sub(cost.bytes, Relaxed);
        self.records.fetch_sub(1, Relaxed);
        if cost.runs {
            self.running_bytes.fetch_sub(cost.bytes, Relaxed);
            self.running_records.fetch_sub(1, Relaxed);
        }
    }

    pub(super) fn tick(&self) -> u64 {
        self.tick.fetch_add(1, Relaxed)
    }

    pub(super) fn set_oldest(&self, shard: usize, tick: Option<u64>) {
        self.oldest[shard].store(tick.unwrap_or(NOTHING), Relaxed);
    }

    /// The shard with the least recently used record, if there is any.
    pub(super) fn oldest_shard(&self) -> Option<usize> {
        let ticks = self.oldest.iter().map(|tick| tick.load(Relaxed));
        let (shard, tick) = ticks.enumerate().min_by_key(|(_, tick)| *tick)?;
        (tick != NOTHING).then_some(shard)
    }

    pub(super) fn is_over(&self) -> bool {
        self.bytes() > self.max.max_size || self.records() > self.max.max_records
    }

    /// Whether running responses use half of the capacity, or would with this many more bytes. The other half is
    /// for their results.
    pub(super) fn is_full_of_running(&self, more: u64) -> bool {
        self.running_records.load(Relaxed) >= self.max.max_records / 2
            || self.running_bytes.load(Relaxed) + more >= self.max.max_size / 2
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    pub(super) fn records(&self) -> u64 {
        self.records.load(Relaxed)
    }
}
