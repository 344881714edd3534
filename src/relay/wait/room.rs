//! How much the workers of a model could take: what each has to compute, against its bound.

use std::sync::Arc;
use std::time::Instant;

use rustc_hash::FxHashMap;

use crate::fleet::{Group, Snapshot, Worker};
use crate::ids::WorkerId;
use crate::queue::{Room, Settings};

/// Free slots of a worker whose slots are not known: more than are ever released at once.
const MANY_SLOTS: u32 = 1 << 20;

/// The workers that compute a model's prompts.
#[derive(Clone, Copy)]
pub(super) struct Workers<'a> {
    workers: &'a [Arc<Worker>],
    is_prefill: bool,
}

impl<'a> Workers<'a> {
    pub(super) fn all(workers: &'a [Arc<Worker>]) -> Self {
        Self {
            workers,
            is_prefill: false,
        }
    }

    pub(super) fn prefill(workers: &'a [Arc<Worker>]) -> Self {
        Self {
            workers,
            is_prefill: true,
        }
    }

    pub(super) fn computed_tokens(&self) -> u64 {
        self.workers
            .iter()
            .map(|worker| worker.load.computed_tokens())
            .sum()
    }

    /// Prompt tokens that the workers have not computed yet, and the number of workers.
    pub(super) fn queued(&self) -> (u64, usize) {
        let queued = self
            .workers
            .iter()
            .map(|worker| worker.load.queued_tokens());
        (queued.sum(), self.workers.len())
    }

    fn can_take(&self, worker: &Worker, now: Instant) -> bool {
        worker.breaker.may_admit(now)
            && (!self.is_prefill || worker.kv_transfer_breaker.may_admit(now))
    }
}

/// Whether two models share a worker, as a model and its adapters do.
pub(super) fn shares_any(group: &Group, other: &Group) -> bool {
    let mut workers = group.workers.iter();
    group.model == other.model
        || workers.any(|worker| other.worker_indices.contains_key(&worker.id))
}

/// Whether any of the workers can take a request and is below its bound. Looks at one after the other from a random
/// one, so that it is short while most have room.
pub(super) fn has_room(workers: Workers<'_>, settings: &Settings, now: Instant, seed: u64) -> bool {
    let count = workers.workers.len();
    if count == 0 {
        return false;
    }
    let first = seed as usize % count;
    let (before, from) = workers.workers.split_at(first);
    from.iter().chain(before).any(|worker| {
        worker.load.queued_tokens() < settings.max_worker_queued_tokens
            && worker.free_slots().is_none_or(|slots| slots > 0)
            && workers.can_take(worker, now)
    })
}

/// Workers that stopped computing are not counted, unless all have: then nothing is known, and requests do not wait.
pub(super) fn room(
    workers: Workers<'_>,
    settings: &Settings,
    stalled: &Stalled,
    now: Instant,
) -> Room {
    let bound = settings.max_worker_queued_tokens;
    let mut room = Room::default();
    let mut stalled_workers = 0;
    for worker in workers.workers {
        if !workers.can_take(worker, now) {
            continue;
        }
        let queued = worker.load.queued_tokens();
        if queued >= bound && stalled.is_stalled(worker.id, settings, now) {
            stalled_workers += 1;
            continue;
        }
        room.workers += 1;
        let slots = worker.free_slots().unwrap_or(MANY_SLOTS);
        if slots > 0 {
            room.free_slots = room.free_slots.saturating_add(slots);
            room.free_tokens += bound.saturating_sub(queued);
        }
        room.queued_tokens += queued;
        room.own_queued_tokens += worker.load.own_queued_tokens();
    }
    if room.workers == 0 && stalled_workers > 0 {
        room.workers = stalled_workers;
        room.free_tokens = bound * u64::from(stalled_workers);
        room.free_slots = MANY_SLOTS;
    }
    room
}

/// When each busy worker last computed something.
#[derive(Debug, Default)]
pub(super) struct Stalled {
    by_worker: FxHashMap<WorkerId, Seen>,
}

#[derive(Debug)]
struct Seen {
    computed: u64,
    queued: u64,
    since: Instant,
}

impl Stalled {
    /// Looks at every worker, while requests wait.
    pub(super) fn update(&mut self, fleet: &Snapshot, now: Instant) {
        self.by_worker
            .retain(|id, _| fleet.workers.iter().any(|it| it.worker.id == *id));
        for status in &fleet.workers {
            let load = &status.worker.load;
            let (computed, queued) = (load.computed_tokens(), load.queued_tokens());
            let seen = self.by_worker.entry(status.worker.id).or_insert(Seen {
                computed,
                queued,
                since: now,
            });
            // Less queued than before: another replica's request, or one that was cancelled.
            if seen.computed != computed || queued < seen.queued || queued == 0 {
                seen.since = now;
            }
            (seen.computed, seen.queued) = (computed, queued);
        }
    }

    /// Without requests that wait, no worker is looked at.
    pub(super) fn clear(&mut self) {
        self.by_worker.clear();
    }

    fn is_stalled(&self, worker: WorkerId, settings: &Settings, now: Instant) -> bool {
        let seen = self.by_worker.get(&worker);
        seen.is_some_and(|seen| {
            now.saturating_duration_since(seen.since) >= settings.advanced.stale_after
        })
    }
}
