//! Where every rank's subscriber says how it stands: for operators, and for routing.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use serde::Serialize;

use super::super::event::Tier;
use super::super::stream::Counts;
use super::super::stream::Reason;
use super::super::stream::State;
use super::rate::Rate;
use crate::ids::WorkerId;

/// How one rank of one worker stands.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    pub worker: String,
    pub rank: u32,
    pub model: String,
    /// `cold`, `partial`, `live` or `stale`; the second and the third count in routing.
    pub state: &'static str,
    pub reason: &'static str,
    /// How long the state has been what it is.
    pub state_age_s: f64,
    pub is_connected: bool,
    /// Why the last connection ended.
    pub lost: Option<String>,
    /// As told by a source that names the engine's process.
    pub epoch: Option<String>,
    pub block_size: Option<u32>,
    /// Distinct blocks held, by tier.
    pub blocks: BTreeMap<&'static str, u64>,
    pub memory_bytes: usize,
    /// The engine's number of the last batch applied.
    pub last_number: Option<u64>,
    pub batches: u64,
    pub events: u64,
    /// Over the last ten seconds.
    pub events_per_second: f64,
    pub stored_blocks: u64,
    pub removed_blocks: u64,
    /// Removals of blocks that were not held. A partial tree has them; in a live one they are odd.
    pub unknown_removals: u64,
    /// From the engine's timestamp of the last live batch until it was applied. Hosts' clocks differ, so
    /// it may be off by that, and negative.
    pub lag_ms: Option<f64>,
    pub held_batches: usize,
    pub held_bytes: usize,
    #[serde(flatten)]
    pub counts: Counts,
    /// Times that all was forgotten, by why.
    pub resets: BTreeMap<&'static str, u64>,
    /// Events left out, by why.
    pub filtered: BTreeMap<&'static str, u64>,
}

impl Status {
    fn new(worker: String, rank: u32, model: String) -> Self {
        Self {
            worker,
            rank,
            model,
            state: State::Cold.as_str(),
            reason: Reason::Starting.as_str(),
            state_age_s: 0.0,
            is_connected: false,
            lost: None,
            epoch: None,
            block_size: None,
            blocks: Tier::ALL.iter().map(|tier| (tier.as_str(), 0)).collect(),
            memory_bytes: 0,
            last_number: None,
            batches: 0,
            events: 0,
            events_per_second: 0.0,
            stored_blocks: 0,
            removed_blocks: 0,
            unknown_removals: 0,
            lag_ms: None,
            held_batches: 0,
            held_bytes: 0,
            counts: Counts::default(),
            resets: BTreeMap::new(),
            filtered: BTreeMap::new(),
        }
    }
}

/// All ranks that have a subscriber.
#[derive(Debug, Default)]
pub struct Board {
    /// Replaced when a subscriber comes or goes, so that readers take no lock.
    seats: ArcSwap<FxHashMap<WorkerId, Vec<Arc<Entry>>>>,
}

#[derive(Debug)]
struct Entry {
    scores: AtomicBool,
    told: Mutex<Told>,
}

#[derive(Debug)]
pub(super) struct Told {
    pub(super) status: Status,
    pub(super) state_since: Instant,
    pub(super) events: Rate,
}

impl Board {
    /// Whether a worker's events are followed, however well.
    pub fn has_events(&self, worker: WorkerId) -> bool {
        self.seats.load().contains_key(&worker)
    }

    /// Whether what is known of a worker counts, for all of its ranks.
    pub fn scores(&self, worker: WorkerId) -> bool {
        self.seats
            .load()
            .get(&worker)
            .is_some_and(|ranks| ranks.iter().all(|rank| rank.scores.load(Relaxed)))
    }

    /// Every rank's status, by worker and rank.
    pub fn statuses(&self, now: Instant) -> Vec<Status> {
        let seats = self.seats.load_full();
        let mut statuses: Vec<Status> = seats
            .values()
            .flatten()
            .map(|entry| {
                let told = &mut *entry.told.lock();
                let mut status = told.status.clone();
                let age = now.saturating_duration_since(told.state_since);
                status.state_age_s = age.as_secs_f64();
                status.events_per_second = told.events.per_second(now);
                status
            })
            .collect();
        statuses.sort_by(|a, b| (&a.worker, a.rank).cmp(&(&b.worker, b.rank)));
        statuses
    }

    pub(super) fn sit(
        self: &Arc<Self>,
        now: Instant,
        worker: WorkerId,
        name: &str,
        rank: u32,
        model: &str,
    ) -> Seat {
        let entry = Arc::new(Entry {
            scores: AtomicBool::new(false),
            told: Mutex::new(Told {
                status: Status::new(name.to_owned(), rank, model.to_owned()),
                state_since: now,
                events: Rate::new(now),
            }),
        });
        self.seats.rcu(|seats| {
            let mut seats = FxHashMap::clone(seats);
            seats.entry(worker).or_default().push(entry.clone());
            seats
        });
        Seat {
            board: self.clone(),
            worker,
            entry,
        }
    }
}

/// A subscriber's place on the board, for as long as it runs.
#[must_use = "dropping the seat takes the status off the board"]
#[derive(Debug)]
pub(super) struct Seat {
    board: Arc<Board>,
    worker: WorkerId,
    entry: Arc<Entry>,
}

impl Seat {
    pub(super) fn tell(&self, change: impl FnOnce(&mut Told)) {
        change(&mut self.entry.told.lock());
    }

    pub(super) fn set_scoring(&self, scores: bool) {
        self.entry.scores.store(scores, Relaxed);
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.board.seats.rcu(|seats| {
            let mut seats = FxHashMap::clone(seats);
            if let Some(ranks) = seats.get_mut(&self.worker) {
                ranks.retain(|entry| !Arc::ptr_eq(entry, &self.entry));
                if ranks.is_empty() {
                    seats.remove(&self.worker);
                }
            }
            seats
        });
    }
}
