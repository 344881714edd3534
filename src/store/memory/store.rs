//! The memory store's shards, owners and capacity: picks the shard of a key, evicts, and reports on all shards.

use std::fmt;
use std::future::ready;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use serde_json::{Value, json};

use super::capacity::Capacity;
use super::document_table::DocumentTable;
use super::outbox_queues::Queues;
use super::owners::Owners;
use super::settings::Settings;
use super::shard::Shard;
use crate::ids::Root;
use crate::observe;
use crate::observe::metrics::Registry;
use crate::store::cancel::NoticeKind;
use crate::store::meters::{Meters, Op, Outcome};
use crate::store::{Error, Notice, Owner, ResponseKey, RetentionSettings, StoreFuture};

/// Locks are held for microseconds; with 64 shards a hundred concurrent requests rarely collide.
pub(super) const SHARDS: usize = 64;
/// One call gives up evicting after it has met this many locked conversations.
const IN_USE_MAX: usize = 128;

/// The clock; tests replace it.
pub type Clock = Arc<dyn Fn() -> Instant + Send + Sync>;

pub struct Memory {
    pub(super) shards: Box<[Mutex<Shard>]>,
    pub(super) owners: Mutex<Owners>,
    pub(super) outbox: Queues,
    pub(super) documents: Mutex<DocumentTable>,
    pub(super) capacity: Arc<Capacity>,
    pub(super) keep: RetentionSettings,
    meters: Meters,
    clock: Clock,
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").finish_non_exhaustive()
    }
}

impl Memory {
    pub fn new(settings: &Settings, keep: &RetentionSettings, registry: &Registry) -> Self {
        Self::with_clock(settings, keep, registry, Arc::new(observe::now))
    }

    /// Creates a store with the given clock.
    pub fn with_clock(
        settings: &Settings,
        keep: &RetentionSettings,
        registry: &Registry,
        clock: Clock,
    ) -> Self {
        let capacity = Arc::new(Capacity::new(settings, SHARDS));
        let shard = |index| Mutex::new(Shard::new(index, keep.clone(), capacity.clone()));
        Self {
            shards: (0..SHARDS).map(shard).collect(),
            owners: Mutex::new(Owners::default()),
            outbox: Queues::new(clock()),
            documents: Mutex::default(),
            capacity,
            keep: keep.clone(),
            meters: Meters::new(registry),
            clock,
        }
    }

    pub(super) fn shard(&self, root: Root) -> &Mutex<Shard> {
        // Roots are random.
        &self.shards[root.0 as usize % SHARDS]
    }

    /// Makes the future of an operation, which counts and times it.
    pub(super) fn operation<'a, T: Outcome + Send + 'a>(
        &'a self,
        op: Op,
        run: impl FnOnce(Instant) -> Result<T, Error> + Send + 'a,
    ) -> StoreFuture<'a, T> {
        self.meters.meter(op, move || ready(run((self.clock)())))
    }

    /// An operation on what has this root: one response or conversation.
    pub(super) fn in_shard<'a, T: Outcome + Send + 'a>(
        &'a self,
        op: Op,
        root: Root,
        run: impl FnOnce(&mut Shard, Instant) -> Result<T, Error> + Send + 'a,
    ) -> StoreFuture<'a, T> {
        self.operation(op, move |now| {
            let result = {
                let mut shard = self.shard(root).lock();
                shard.drop_expired(now);
                run(&mut shard, now)
            };
            self.make_room(now);
            result
        })
    }

    /// Evicts the least recently used finished records until the rest fits.
    fn make_room(&self, now: Instant) {
        let (mut evicted, mut in_use) = (0, 0);
        while self.capacity.is_over() && in_use < IN_USE_MAX {
            let Some(index) = self.capacity.oldest_shard() else {
                break;
            };
            if self.shards[index].lock().evict(now) {
                evicted += 1;
            } else {
                in_use += 1;
            }
        }
        let metrics = &self.meters.metrics;
        if evicted > 0 {
            let of_capacity = metrics.evicted.with_label_values(&["capacity"]);
            of_capacity.inc_by(evicted);
        }
        metrics.bytes.set(self.capacity.bytes() as i64);
        metrics.records.set(self.capacity.records() as i64);
    }

    pub(super) fn notify(&self, owner: Option<Owner>, key: ResponseKey, kind: NoticeKind) {
        if let Some(owner) = owner {
            let at_ms = observe::unix_ms();
            let notice = Notice { key, kind, at_ms };
            self.owners.lock().notify(owner, notice);
        }
    }

    /// Counts, sizes, limits and owners, for the operators' report.
    pub(super) fn details(&self, now: Instant) -> Value {
        let alive = self.owners.lock().alive(now);
        let (mut responses, mut running, mut conversations) = (0, 0, 0);
        let (mut log_bytes, mut orphans) = (0, 0);
        for shard in &self.shards {
            let shard = shard.lock();
            responses += shard.finished.len();
            running += shard.running.len();
            conversations += shard.conversations.len();
            let runs = shard
                .running
                .values()
                .filter_map(|found| found.run.as_ref());
            log_bytes += runs.map(|run| run.log.bytes).sum::<u64>();
            orphans += shard.orphans(&alive).len();
        }
        let owners = self.owners.lock().report(now);
        json!({
            "responses": responses,
            "running": running,
            "conversations": conversations,
            "documents": self.documents.lock().len(),
            "bytes": self.capacity.bytes(),
            "bytes_max": self.capacity.max.max_size,
            "records_max": self.capacity.max.max_records,
            "log_bytes": log_bytes,
            "orphans": orphans,
            "owners": owners,
        })
    }
}
