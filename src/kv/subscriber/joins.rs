//! What all ranks share while they join: how many replay at once, and the memory of the batches that wait meanwhile.
//!
//! A rank joins when its source has connected, until the engine has replayed what it keeps. Its live batches wait that
//! long, so a thousand ranks that join at once would keep a thousand queues.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::observe::metrics::{Counted, Registry, metric_table};

/// A join that takes longer lets the next rank begin: one slow engine must not keep others waiting.
const MAX_JOIN_TIME: Duration = Duration::from_secs(30);

/// Ranks that join at the same time.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Ranks that are asked for a replay at the same time, after their events were connected. Others wait; they are
    /// connected, and not read. One thread applies all events, so more at once are not faster.
    pub max_concurrent: usize,
    /// Size of the batches of all ranks together that wait for replays to end. Beyond it a rank's batches are dropped
    /// and asked for again after its replay.
    pub max_queued_size: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            // An engine's replay of 10,000 batches takes about a second, most of it its own time.
            max_concurrent: 32,
            // 16 ranks whose queues are full.
            max_queued_size: 256 << 20,
        }
    }
}

/// Shared by all subscribers.
#[derive(Clone, Debug)]
pub struct Joins(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    permits: Arc<Semaphore>,
    max_queued_bytes: usize,
    queued_bytes: AtomicUsize,
    metrics: Metrics,
}

metric_table! {
    #[derive(Debug)]
    struct Metrics {
        joining: gauge "warmroute_kv_joining_ranks"
            "Ranks that are being asked for a first replay of their KV events.",
        waiting: gauge "warmroute_kv_joins_waiting"
            "Ranks whose KV events are connected and that wait because as many others join.",
        delayed: counter "warmroute_kv_joins_delayed_total"
            "Times that a rank had to wait because as many others joined.",
        queued_bytes: gauge "warmroute_kv_queued_bytes"
            "Size of the batches of KV events of all ranks that wait for replays to end.",
        dropped: counter "warmroute_kv_queue_full_total"
            "Batches dropped because those of all ranks that wait reached their memory limit; they are requested again.",
    }
}

impl Joins {
    pub fn new(settings: &Settings, registry: &Registry) -> Self {
        Self(Arc::new(Shared {
            permits: Arc::new(Semaphore::new(settings.max_concurrent)),
            max_queued_bytes: settings.max_queued_size,
            queued_bytes: AtomicUsize::new(0),
            metrics: Metrics::new(registry),
        }))
    }

    /// A permit to join, if there is one at once.
    pub(super) fn try_enter(&self, now: Instant) -> Option<Joining> {
        let permit = self.0.permits.clone().try_acquire_owned().ok()?;
        Some(self.joining(now, permit))
    }

    /// Waits for a permit; who waits longest gets it first.
    pub(super) async fn enter(self, now: impl FnOnce() -> Instant) -> Joining {
        let metrics = &self.0.metrics;
        metrics.delayed.inc();
        let _waiting = Counted::new(&metrics.waiting);
        let permit = self.0.permits.clone().acquire_owned().await;
        self.joining(now(), permit.expect("the semaphore is never closed"))
    }

    fn joining(&self, now: Instant, permit: OwnedSemaphorePermit) -> Joining {
        Joining {
            until: now + MAX_JOIN_TIME,
            _count: Counted::new(&self.0.metrics.joining),
            _permit: permit,
        }
    }

    /// The account of one rank's waiting batches.
    pub(super) fn queue(&self) -> QueuedBytes {
        QueuedBytes {
            shared: self.0.clone(),
            bytes: 0,
        }
    }
}

/// One rank joins; dropping it lets another begin.
#[must_use = "dropping it ends the join"]
#[derive(Debug)]
pub(super) struct Joining {
    pub(super) until: Instant,
    _count: Counted,
    _permit: OwnedSemaphorePermit,
}

/// The bytes of one rank's waiting batches in the budget of all ranks; given back when dropped.
#[derive(Debug)]
pub(super) struct QueuedBytes {
    shared: Arc<Shared>,
    bytes: usize,
}

impl QueuedBytes {
    /// Whether a batch may wait. A rank's first may, so that no batch is requested for ever.
    pub(super) fn admits(&self, bytes: usize) -> bool {
        let shared = &self.shared;
        let all = shared.queued_bytes.load(Relaxed);
        let fits = self.bytes == 0 || all.saturating_add(bytes) <= shared.max_queued_bytes;
        if !fits {
            shared.metrics.dropped.inc();
        }
        fits
    }

    pub(super) fn set(&mut self, bytes: usize) {
        if bytes != self.bytes {
            let more = bytes.wrapping_sub(self.bytes);
            self.shared.queued_bytes.fetch_add(more, Relaxed);
            let gauge = &self.shared.metrics.queued_bytes;
            gauge.add(more.cast_signed() as i64);
            self.bytes = bytes;
        }
    }
}

impl Drop for QueuedBytes {
    fn drop(&mut self) {
        self.set(0);
    }
}
