//! Where every rank's subscriber says how it stands: for operators, and for routing.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, Guard};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use serde::Serialize;

use super::rate::Rate;
use crate::ids::WorkerId;
use crate::kv::event::{Batch, Event, Tier};
use crate::kv::index::CopyReport;
use crate::kv::parity::difference::Heard;
use crate::kv::stream::{Counts, Reason, State};
use crate::observe;

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
    /// Why the last question for earlier batches had no answer; none once one was answered.
    pub replay_failed: Option<String>,
    /// What was wrong with the last batch that could not be read.
    pub unreadable: Option<String>,
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
            replay_failed: None,
            unreadable: None,
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
    /// Seats whose source has not been connected yet.
    unheard: AtomicU32,
}

/// The board as one request looks at it.
#[derive(Debug)]
pub struct Seats {
    seats: Guard<Arc<FxHashMap<WorkerId, Vec<Arc<Entry>>>>>,
    are_all_heard: bool,
}

impl Seats {
    /// Whether every subscriber has been connected: then nobody need be asked for.
    #[inline]
    pub fn are_all_heard(&self) -> bool {
        self.are_all_heard
    }

    /// Whether all of a worker's ranks, so many, have been listened to. A worker that only says where its
    /// events are, and cannot be reached there, is one without.
    pub fn is_heard(&self, worker: WorkerId, ranks: u32) -> bool {
        self.seats.get(&worker).is_some_and(|seats| {
            seats.len() >= ranks as usize && seats.iter().all(|rank| rank.heard.load(Relaxed))
        })
    }
}

#[derive(Debug)]
struct Entry {
    scores: AtomicBool,
    /// All that the rank holds is known, and what it holds and is not known.
    live: AtomicBool,
    partial: AtomicBool,
    /// Its source has been connected.
    heard: AtomicBool,
    /// How often all was forgotten.
    losses: AtomicU64,
    /// Whether what it tells is to be remembered.
    records: AtomicBool,
    told: Mutex<Told>,
    asked: Mutex<Asked>,
}

/// How a worker stands, all of its ranks together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// All that any rank holds is known.
    pub is_live: bool,
    /// How often all was forgotten: two standings with different ones are of different caches.
    pub losses: u64,
    /// Ever removed, and held now; figures of a moment ago.
    pub removed_blocks: u64,
    pub blocks: u64,
    /// When the last batch of any rank was applied.
    pub applied_at: Option<Instant>,
}

/// How one rank's tree stands, for an explanation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TreeState {
    pub rank: u32,
    pub state: &'static str,
    pub reason: &'static str,
    pub state_age_s: f64,
}

/// What the engine was asked to tell again.
#[derive(Debug, Default)]
struct Asked {
    /// Requests that ask so and are not computed yet.
    running: u32,
    /// The last of those before is answered for sure.
    until: Option<Instant>,
    /// Whether any was since all was forgotten: earlier batches that come again may answer it.
    was_asked: bool,
}

/// After a prompt's first token, for the engine's answer to come: longer than batches are ever held back.
const ANSWER: Duration = Duration::from_secs(60);

/// Of what a suspected engine tells: so many stores of so many tokens, for each rank.
const HEARD_MAX: usize = 16;
const HEARD_TOKENS_MAX: usize = 4_096;

#[derive(Debug)]
pub(super) struct Told {
    pub(super) status: Status,
    pub(super) state_since: Instant,
    pub(super) events: Rate,
    pub(super) applied_at: Option<Instant>,
    heard: VecDeque<Heard>,
}

impl Board {
    /// Whether a worker's events are followed, however well.
    pub fn has_events(&self, worker: WorkerId) -> bool {
        self.seats.load().contains_key(&worker)
    }

    pub fn seats(&self) -> Seats {
        Seats {
            are_all_heard: self.unheard.load(Relaxed) == 0,
            seats: self.seats.load(),
        }
    }

    /// Whether what is known of a worker counts, for all of its ranks.
    pub fn scores(&self, worker: WorkerId) -> bool {
        self.seats
            .load()
            .get(&worker)
            .is_some_and(|ranks| ranks.iter().all(|rank| rank.scores.load(Relaxed)))
    }

    /// None where not all of a worker's ranks, so many, have a subscriber.
    pub fn standing(&self, worker: WorkerId, ranks: u32) -> Option<Standing> {
        let seats = self.seats.load();
        let seats = seats.get(&worker)?;
        if seats.len() < ranks as usize {
            return None;
        }
        let mut standing = Standing {
            is_live: true,
            losses: 0,
            removed_blocks: 0,
            blocks: 0,
            applied_at: None,
        };
        for rank in seats {
            standing.is_live &= rank.live.load(Relaxed);
            standing.losses += rank.losses.load(Relaxed);
            let told = rank.told.lock();
            standing.removed_blocks += told.status.removed_blocks;
            standing.blocks += told.status.blocks.values().sum::<u64>();
            standing.applied_at = standing.applied_at.max(told.applied_at);
        }
        Some(standing)
    }

    /// How each rank's tree of a worker stands.
    pub fn trees(&self, now: Instant, worker: WorkerId) -> Vec<TreeState> {
        let seats = self.seats.load();
        let seats = seats.get(&worker).map(Vec::as_slice).unwrap_or_default();
        let tree = |entry: &Arc<Entry>| {
            let told = entry.told.lock();
            let age = now.saturating_duration_since(told.state_since);
            TreeState {
                rank: told.status.rank,
                state: told.status.state,
                reason: told.status.reason,
                state_age_s: age.as_secs_f64(),
            }
        };
        let mut trees: Vec<TreeState> = seats.iter().map(tree).collect();
        trees.sort_by_key(|tree| tree.rank);
        trees
    }

    /// Whether some rank of a worker holds more than is known, and what is known counts.
    pub fn is_partial(&self, worker: WorkerId) -> bool {
        let seats = self.seats.load();
        let seats = seats.get(&worker);
        seats.is_some_and(|ranks| ranks.iter().any(|rank| rank.partial.load(Relaxed)))
    }

    /// Begins to remember what a worker tells, or stops and forgets it.
    pub fn record(&self, worker: WorkerId, records: bool) {
        for rank in self.seats.load().get(&worker).into_iter().flatten() {
            if rank.records.swap(records, Relaxed) && !records {
                rank.told.lock().heard = VecDeque::new();
            }
        }
    }

    /// What is remembered.
    pub fn heard(&self, worker: WorkerId) -> Vec<Heard> {
        let seats = self.seats.load();
        let ranks = seats.get(&worker).into_iter().flatten();
        ranks
            .flat_map(|rank| rank.told.lock().heard.iter().cloned().collect::<Vec<_>>())
            .collect()
    }

    /// A request asks a worker's engine to tell again what it held of its prompt. What comes then is not
    /// taken for further copies.
    pub fn ask(&self, worker: WorkerId) -> Asking {
        let seats = self.seats.load();
        let entries = seats.get(&worker).cloned().unwrap_or_default();
        for entry in &entries {
            let mut asked = entry.asked.lock();
            asked.running += 1;
            asked.was_asked = true;
        }
        Asking { entries }
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
            live: AtomicBool::new(false),
            partial: AtomicBool::new(false),
            heard: AtomicBool::new(false),
            losses: AtomicU64::new(0),
            records: AtomicBool::new(false),
            asked: Mutex::default(),
            told: Mutex::new(Told {
                status: Status::new(name.to_owned(), rank, model.to_owned()),
                state_since: now,
                events: Rate::new(now),
                applied_at: None,
                heard: VecDeque::new(),
            }),
        });
        self.unheard.fetch_add(1, Relaxed);
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

    pub(super) fn set_heard(&self) {
        if !self.entry.heard.swap(true, Relaxed) {
            self.board.unheard.fetch_sub(1, Relaxed);
        }
    }

    /// Only what is partial or live scores.
    pub(super) fn set_state(&self, state: State) {
        self.entry.scores.store(state.scores(), Relaxed);
        let is_live = matches!(state, State::Live);
        self.entry.live.store(is_live, Relaxed);
        let is_partial = matches!(state, State::Partial);
        self.entry.partial.store(is_partial, Relaxed);
    }

    /// All was forgotten. What was asked of the process before is of the past.
    pub(super) fn lost(&self) {
        self.entry.losses.fetch_add(1, Relaxed);
        let mut asked = self.entry.asked.lock();
        asked.was_asked = asked.running > 0;
    }

    /// Remembers what a batch tells, if that is asked for.
    pub(super) fn hear(&self, batch: &Batch) {
        if !self.entry.records.load(Relaxed) {
            return;
        }
        let heard = &mut self.entry.told.lock().heard;
        for event in &batch.events {
            let Event::Stored(stored) = event else {
                continue;
            };
            if heard.len() == HEARD_MAX {
                heard.pop_front();
            }
            let tokens = stored.token_ids.iter().take(HEARD_TOKENS_MAX);
            heard.push_back(Heard {
                is_start: stored.parent.is_none(),
                tokens: tokens.copied().collect(),
            });
        }
    }

    /// What a batch says of copies: while an answer may come, a chain from its start on may have been
    /// told before.
    pub(super) fn copies(&self, now: Instant, is_live: bool) -> CopyReport {
        let asked = self.entry.asked.lock();
        let is_awaited = asked.running > 0 || asked.until.is_some_and(|until| now < until);
        match is_awaited || asked.was_asked && !is_live {
            true => CopyReport::AtLeastOne,
            false => CopyReport::OneMore,
        }
    }
}

/// A request that asks an engine to tell again. Dropped when its prompt is computed, or given up.
#[must_use = "dropping it says that the request is computed"]
#[derive(Debug)]
pub struct Asking {
    entries: Vec<Arc<Entry>>,
}

impl Drop for Asking {
    fn drop(&mut self) {
        let until = observe::now() + ANSWER;
        for entry in &self.entries {
            let mut asked = entry.asked.lock();
            asked.running = asked.running.saturating_sub(1);
            asked.until = Some(until);
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if !self.entry.heard.load(Relaxed) {
            self.board.unheard.fetch_sub(1, Relaxed);
        }
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
