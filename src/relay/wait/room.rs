//! How much workers could take: what each has to compute and to generate, against its bounds.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustc_hash::{FxHashMap, FxHashSet};
use xxhash_rust::xxh3::xxh3_64;

use crate::fleet::load::Load;
use crate::fleet::{Snapshot, Worker};
use crate::http::circuit_breaker::{SharedBreaker, State};
use crate::ids::{Model, WorkerId};
use crate::queue::{self, Settings};
use crate::relay::choose::promised::{Promise, Promised};

/// The workers that compute a model's prompts.
#[derive(Clone, Copy)]
pub(super) struct Workers<'a> {
    pub(super) workers: &'a [Arc<Worker>],
    pub(super) is_prefill: bool,
}

impl<'a> Workers<'a> {
    /// What the workers have now, of all replicas.
    pub(super) fn load(&self) -> GroupLoad {
        let mut load = GroupLoad {
            workers: self.workers.len(),
            ..GroupLoad::default()
        };
        for worker in self.workers {
            load.ranks += u64::from(worker.ranks());
            load.queued_tokens += worker.load.queued_tokens();
            load.requests += u64::from(worker.load.requests());
            if let Some(slots) = worker.known_slots() {
                load.known_slots += u64::from(slots);
                load.with_known_slots += 1;
            }
        }
        load
    }

    /// Whether any of them may get a request.
    pub(super) fn can_take(self, now: Instant) -> bool {
        self.usable(now).next().is_some()
    }

    /// Whether the circuit breaker of any of them is closed. Its engine may have asked for a pause.
    pub(super) fn are_up(self) -> bool {
        self.up().next().is_some()
    }

    fn up(self) -> impl Iterator<Item = &'a Arc<Worker>> {
        let workers = self.workers.iter();
        workers.filter(move |worker| self.is_closed(worker))
    }

    /// Whether a worker's circuit breaker is closed. Else the worker gets one request at most, as a trial.
    fn is_closed(self, worker: &Worker) -> bool {
        let is_closed = |breaker: &SharedBreaker| breaker.state() == State::Closed;
        is_closed(&worker.breaker) && (!self.is_prefill || is_closed(&worker.kv_transfer_breaker))
    }

    pub(super) fn usable(self, now: Instant) -> impl Iterator<Item = &'a Arc<Worker>> {
        let is_prefill = self.is_prefill;
        self.workers.iter().filter(move |worker| {
            worker.breaker.may_admit(now)
                && (!is_prefill || worker.kv_transfer_breaker.may_admit(now))
        })
    }
}

/// What the workers that compute a model's prompts have together.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct GroupLoad {
    pub(super) workers: usize,
    /// Dp ranks of all of them.
    ranks: u64,
    /// Prompt tokens that they have not computed yet.
    pub(super) queued_tokens: u64,
    requests: u64,
    /// Slots of the workers of which they are known.
    known_slots: u64,
    /// How many workers these are.
    with_known_slots: usize,
}

impl GroupLoad {
    /// What they have, and requests that wait for them with so many tokens, by what they may have: of tokens or of requests,
    /// of which there is more. 1: all of them are busy. No worker counts as one.
    pub(super) fn saturation(&self, (requests, tokens): (u32, u64), settings: &Settings) -> f64 {
        let ranks = self.ranks.max(1) as f64;
        let max_tokens = settings.max_worker_queued_tokens.max(1) as f64 * ranks;
        let of_tokens = (tokens + self.queued_tokens) as f64 / max_tokens;
        if self.with_known_slots == 0 {
            return of_tokens;
        }
        // A worker whose slots are not known yet has as many as the others.
        let slots = self.known_slots as f64 / self.with_known_slots as f64 * self.workers as f64;
        let of_requests = (u64::from(requests) + self.requests) as f64 / slots.max(1.0);
        of_tokens.max(of_requests)
    }
}

/// A worker that has so many prompt tokens to compute has no room for more.
fn max_queued_tokens(worker: &Worker, settings: &Settings) -> u64 {
    let of_rank = settings.max_worker_queued_tokens;
    of_rank.saturating_mul(worker.ranks().into())
}

/// Whether a worker has room for one more request behind what is promised, and nobody waits for it. `rank`: the dp rank that
/// the request is pinned to, which has room of its own.
pub(in crate::relay) fn has_room(
    worker: &Worker,
    rank: Option<u32>,
    settings: &Settings,
    promised: Option<&Promised>,
) -> bool {
    let promise = |owner| promised.map_or_else(Promise::default, |promised| promised.of(owner));
    let all = promise(worker.id);
    // Those that wait for another worker to compute their prompt take no slot yet.
    let requests = all.all.minus(all.waiting).requests;
    if worker.free_slots().is_some_and(|slots| slots <= requests) {
        return false;
    }
    let Some(rank) = rank else {
        let queued = worker.load.queued_tokens() + all.all.queued_tokens;
        return all.in_line == 0 && queued < max_queued_tokens(worker, settings);
    };
    let promise = promise(worker.id.cache_owner(Some(rank)));
    let share = worker.pinned.share(&worker.load, rank, worker.ranks());
    let queued = share.queued_tokens + promise.all.queued_tokens;
    promise.in_line == 0 && queued < settings.max_worker_queued_tokens
}

/// Whether a worker, or one of its dp ranks, has room.
fn has_any_room(worker: &Worker, settings: &Settings, promised: &Promised) -> bool {
    let ranks = if worker.ranks() > 1 {
        worker.ranks()
    } else {
        0
    };
    let mut places = (0..ranks).map(Some).chain([None]);
    places.any(|rank| has_room(worker, rank, settings, Some(promised)))
}

/// The workers of a queue at one moment.
#[derive(Debug, Default)]
pub(super) struct Rooms {
    pub(super) room: queue::Room,
    /// Prompt tokens that they have computed so far.
    pub(super) computed_tokens: u64,
    /// The workers with room, each with the number of its dp ranks.
    open: FxHashMap<WorkerId, u32>,
    seen: FxHashSet<WorkerId>,
    /// The workers that get one request only, as the trial of their circuit breaker.
    trials: FxHashSet<WorkerId>,
    /// Workers that stopped working. They are not counted, unless all have: then nothing is known, and requests do not
    /// wait.
    stalled: Vec<WorkerId>,
    /// These and the decode workers that stopped working, for each model that has other decode workers.
    stalled_of: FxHashMap<Model, Vec<WorkerId>>,
    is_unknown: bool,
}

impl Rooms {
    pub(super) fn new<'a>(
        workers: impl Iterator<Item = Workers<'a>>,
        settings: &Settings,
        promised: &Promised,
        stalled: &Stalled,
        now: Instant,
    ) -> Self {
        let mut rooms = Self::default();
        let (mut rates, mut rates_of_stalled) = (0.0, 0.0);
        let usable = |workers: Workers<'a>| {
            let found = workers.usable(now);
            found.map(move |worker| (worker, !workers.is_closed(worker)))
        };
        let workers: Vec<Workers<'a>> = workers.collect();
        for (worker, is_trial) in workers.iter().copied().flat_map(usable) {
            if !rooms.seen.insert(worker.id) {
                continue;
            }
            if is_trial {
                rooms.trials.insert(worker.id);
            }
            let load = &worker.load;
            rooms.computed_tokens += load.computed_tokens();
            rooms.room.counted_workers ^= xxh3_64(&worker.id.0.to_le_bytes());
            let rate = load.speed.get().rate();
            if stalled.is_full_and_stalled(worker, settings, now) {
                rooms.stalled.push(worker.id);
                rates_of_stalled += rate;
                continue;
            }
            let promise = promised.of(worker.id);
            if rooms.may_open(worker, settings, promised) {
                rooms.open.insert(worker.id, worker.ranks());
            }
            rates += rate;
            rooms.room.workers += 1;
            rooms.room.queued_tokens += load.queued_tokens() + promise.all.queued_tokens;
        }
        if rooms.room.workers == 0 && !rooms.stalled.is_empty() {
            rooms.is_unknown = true;
            rates = rates_of_stalled;
            rooms.room.workers = rooms.stalled.len() as u32;
            let stalled = std::mem::take(&mut rooms.stalled);
            rooms
                .open
                .extend(stalled.into_iter().map(|worker| (worker, 1)));
        }
        if rooms.room.workers == 0 {
            // Those whose engines have asked for a pause are busy, and not gone. What they compute is not counted.
            for worker in workers.iter().flat_map(|workers| workers.up()) {
                if rooms.seen.insert(worker.id) {
                    rates += worker.load.speed.get().rate();
                    rooms.room.workers += 1;
                    rooms.room.queued_tokens += worker.load.queued_tokens();
                }
            }
        }
        rooms.room.rate = (rates / f64::from(rooms.room.workers.max(1))) as u64;
        rooms.room.is_full = rooms.open.is_empty();
        rooms
    }

    /// With each model's workers that compute the prompts of some requests only. They are not counted.
    pub(super) fn with_others<'a>(
        mut self,
        others: impl Iterator<Item = (&'a Model, Workers<'a>)>,
        settings: &Settings,
        promised: &Promised,
        stalled: &Stalled,
        now: Instant,
    ) -> Self {
        // Models with the same workers are looked at once.
        let mut looked_at: FxHashMap<*const [Arc<Worker>], Option<Vec<WorkerId>>> =
            FxHashMap::default();
        for (model, workers) in others {
            let look = || self.look_at_others(workers, settings, promised, stalled, now);
            let found = looked_at.entry(workers.workers).or_insert_with(look);
            if let Some(stalled) = found {
                self.stalled_of.insert(model.clone(), stalled.clone());
            }
        }
        self
    }

    /// Adds the decode workers of some models that have room. Returns the workers that requests for these models do not
    /// wait for, if some decode workers have stopped working and others have not.
    fn look_at_others(
        &mut self,
        workers: Workers<'_>,
        settings: &Settings,
        promised: &Promised,
        stalled: &Stalled,
        now: Instant,
    ) -> Option<Vec<WorkerId>> {
        for worker in workers.usable(now) {
            let is_new = self.seen.insert(worker.id);
            if is_new && !workers.is_closed(worker) {
                self.trials.insert(worker.id);
            }
            if is_new && self.may_open(worker, settings, promised) {
                self.open.insert(worker.id, worker.ranks());
                self.room.others_have_room = true;
            }
        }
        let (stopped, working): (Vec<_>, Vec<_>) = workers
            .usable(now)
            .partition(|worker| stalled.is_full_and_stalled(worker, settings, now));
        // Pairs go on with stalled ones if there are no others.
        if stopped.is_empty() || working.is_empty() {
            return None;
        }
        let stopped = stopped.into_iter().map(|worker| worker.id);
        let stopped = stopped.filter(|worker| !self.open.contains_key(worker));
        Some(self.stalled.iter().copied().chain(stopped).collect())
    }

    /// Workers that stopped working, which requests for a model do not wait for.
    pub(super) fn stalled(&self, model: &Model) -> &[WorkerId] {
        self.stalled_of.get(model).unwrap_or(&self.stalled)
    }

    /// Whether a worker, or one of its dp ranks, has room. One that gets its trial only has none once that is on its way.
    fn may_open(&self, worker: &Worker, settings: &Settings, promised: &Promised) -> bool {
        let promise = promised.of(worker.id);
        let is_released = promise.all.minus(promise.waiting).requests > 0;
        let has_trial = is_released && self.trials.contains(&worker.id);
        !has_trial && has_any_room(worker, settings, promised)
    }

    /// Whether none has room any more.
    pub(super) fn is_full(&self) -> bool {
        self.open.is_empty()
    }

    /// Whether a worker had room when the rooms were read.
    pub(super) fn is_open_at_all(&self, worker: WorkerId) -> bool {
        self.open.contains_key(&worker)
    }

    /// Whether a worker has room for one more request, or the dp rank that the request is pinned to.
    pub(super) fn is_open(
        &self,
        worker: &Worker,
        rank: Option<u32>,
        settings: &Settings,
        promised: &Promised,
    ) -> bool {
        let has_room = || has_room(worker, rank, settings, Some(promised));
        match self.open.get(&worker.id) {
            Some(1) => true,
            Some(_) => self.is_unknown || has_room(),
            // It joined after the rooms were read.
            None => !self.seen.contains(&worker.id) && has_room(),
        }
    }

    /// Whether a worker that was full has no room yet. False for one that requests for the model do not wait for now.
    pub(super) fn is_still_full(&self, worker: WorkerId, model: &Model) -> bool {
        let is_waited_for = self.seen.contains(&worker) && !self.stalled(model).contains(&worker);
        is_waited_for && !self.open.contains_key(&worker)
    }

    /// Requests that wait come before those that are looked at next: a worker for which one of them waits has no room for
    /// these.
    pub(super) fn close_waited_for(&mut self, promised: &Promised) {
        if !self.is_unknown {
            self.open.retain(|worker, ranks| {
                let is_free = |rank| promised.of(worker.cache_owner(rank)).in_line == 0;
                is_free(None) || *ranks > 1 && (0..*ranks).any(|rank| is_free(Some(rank)))
            });
        }
    }

    /// Whether a worker that one of those waits for would have room now.
    pub(super) fn has_room_for_one_of(&self, waiting: &Promised) -> bool {
        let mut open = self.open.keys();
        !self.is_unknown && open.any(|worker| waiting.of(*worker).in_line > 0)
    }

    pub(super) fn on_promised(
        &mut self,
        worker: &Worker,
        settings: &Settings,
        promised: &Promised,
    ) {
        let has_room = self.is_unknown || has_any_room(worker, settings, promised);
        if !has_room || self.trials.contains(&worker.id) {
            self.open.remove(&worker.id);
        }
    }
}

/// Workers are looked at several times a second while requests wait. If so long passes between two looks, this process was
/// paused, and what the workers did meanwhile is not known.
const PAUSE: Duration = Duration::from_secs(5);

/// When each busy worker was last seen to work.
#[derive(Debug, Default)]
pub(super) struct Stalled {
    by_worker: FxHashMap<WorkerId, Seen>,
}

#[derive(Debug)]
struct Seen {
    signs: Signs,
    queued: u64,
    since: Instant,
}

/// What changes while a worker's engine works. One that is full of long answers computes no prompts.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Signs {
    computed_tokens: u64,
    answering: u64,
    /// The requests that its engine runs and lets wait, and the used part of its KV cache. An engine that hangs reports
    /// the same again.
    reported: Option<(u32, u32, f64)>,
}

impl Signs {
    fn of(load: &Load) -> Self {
        let reported = load.reported();
        Self {
            computed_tokens: load.computed_tokens(),
            answering: load.answering(),
            reported: reported.map(|report| (report.running, report.waiting, report.kv_usage)),
        }
    }
}

impl Stalled {
    /// As [`Stalled::update`], for so long after the last look.
    pub(super) fn update_after(&mut self, passed: Duration, fleet: &Snapshot, now: Instant) {
        if passed >= PAUSE {
            self.clear();
        }
        self.update(fleet, now);
    }

    /// Looks at every worker, while requests wait.
    pub(super) fn update(&mut self, fleet: &Snapshot, now: Instant) {
        let listed = fleet.workers.iter().map(|status| status.worker.id);
        let listed: FxHashSet<WorkerId> = listed.collect();
        self.by_worker.retain(|id, _| listed.contains(id));
        for status in &fleet.workers {
            let load = &status.worker.load;
            let (mut signs, queued) = (Signs::of(load), load.queued_tokens());
            let seen = self.by_worker.entry(status.worker.id).or_insert(Seen {
                signs,
                queued,
                since: now,
            });
            // A report that is missing is no sign.
            signs.reported = signs.reported.or(seen.signs.reported);
            // Without reports an answer that is not streamed shows nothing.
            let is_idle = queued == 0 && (load.requests() == 0 || signs.reported.is_none());
            // Less queued than before: another replica's request, or one that was cancelled.
            if seen.signs != signs || queued < seen.queued || is_idle {
                seen.since = now;
            }
            (seen.signs, seen.queued) = (signs, queued);
        }
    }

    /// Without requests that wait, no worker is looked at.
    pub(super) fn clear(&mut self) {
        self.by_worker.clear();
    }

    fn is_stalled(&self, worker: WorkerId, settings: &Settings, now: Instant) -> bool {
        let seen = self.by_worker.get(&worker);
        seen.is_some_and(|seen| now.saturating_duration_since(seen.since) >= settings.stale_after)
    }

    /// Whether a worker has all the prompt tokens or requests that it may have, and has stopped working.
    fn is_full_and_stalled(&self, worker: &Worker, settings: &Settings, now: Instant) -> bool {
        let has_all_tokens = worker.load.queued_tokens() >= max_queued_tokens(worker, settings);
        let is_full = has_all_tokens || worker.free_slots() == Some(0);
        is_full && self.is_stalled(worker.id, settings, now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::Member;
    use crate::fleet::events::{Endpoint, Events};
    use crate::fleet::in_flight::InFlight;
    use crate::fleet::load::LoadReport;
    use crate::fleet::registry::tests::{member, registry};
    use crate::observe;

    #[test]
    fn workers_are_saturated_by_what_they_have_to_compute_or_by_their_requests() {
        let settings = Settings {
            max_worker_queued_tokens: 1_000,
            ..Settings::default()
        };
        let load = GroupLoad {
            workers: 4,
            ranks: 4,
            queued_tokens: 800,
            requests: 64,
            ..GroupLoad::default()
        };
        let saturation = |load: &GroupLoad| load.saturation((16, 200), &settings);
        assert_eq!(saturation(&load), 0.25);
        // Two of them are known to have 20 slots each, so there are 80.
        let slots = GroupLoad {
            known_slots: 40,
            with_known_slots: 2,
            ..load
        };
        assert_eq!(saturation(&slots), 1.0);
        let computing = GroupLoad {
            queued_tokens: 7_800,
            ..slots
        };
        assert_eq!(saturation(&computing), 2.0);
        let ranked = GroupLoad {
            ranks: 16,
            ..computing
        };
        assert_eq!(saturation(&ranked), 1.0);
    }

    #[test]
    fn a_busy_worker_is_stalled_once_nothing_of_its_engine_changes() {
        let settings = Settings::default();
        let fleet = registry(&["a"]);
        let worker = fleet.snapshot().workers[0].worker.clone();
        let _queued = InFlight::new(worker.clone(), 100, 0);
        let (mut stalled, start) = (Stalled::default(), observe::now());
        let report = |kv_usage| {
            worker.load.report(LoadReport {
                at: start,
                running: 3,
                waiting: 0,
                deferred: 0,
                kv_usage,
            });
        };
        let mut is_stalled_after = |seconds| {
            let now = start + Duration::from_secs(seconds);
            stalled.update(&fleet.snapshot(), now);
            stalled.is_stalled(worker.id, &settings, now)
        };
        report(0.5);
        assert!(!is_stalled_after(0));
        // It computes no prompt, but its answers grow.
        report(0.6);
        assert!(!is_stalled_after(31));
        worker.load.on_answering();
        assert!(!is_stalled_after(62));
        // A report of the same, or none, is no sign.
        report(0.6);
        assert!(!is_stalled_after(91));
        worker.load.expire_report();
        assert!(is_stalled_after(92));
    }

    /// Else all that waits would leave at once, for workers that are full.
    #[test]
    fn after_a_pause_of_this_process_no_worker_is_stalled() {
        let settings = Settings::default();
        let fleet = registry(&["a"]);
        let snapshot = fleet.snapshot();
        let worker = &snapshot.workers[0].worker;
        let _queued = InFlight::new(worker.clone(), 100, 0);
        for (passed, expected) in [(PAUSE / 2, true), (settings.stale_after, false)] {
            let (mut stalled, start) = (Stalled::default(), observe::now());
            let later = start + settings.stale_after;
            stalled.update(&snapshot, start);
            stalled.update_after(passed, &snapshot, later);
            assert_eq!(stalled.is_stalled(worker.id, &settings, later), expected);
        }
    }

    /// Else each request with a target that enters then would be expected to take a second for each of its tokens.
    #[test]
    fn while_all_workers_are_stalled_their_speed_is_known() {
        let settings = Settings {
            max_worker_queued_tokens: 1_000,
            ..Settings::default()
        };
        let fleet = registry(&["a"]);
        let snapshot = fleet.snapshot();
        let workers = [snapshot.workers[0].worker.clone()];
        let _queued = InFlight::new(workers[0].clone(), 1_000, 0);
        let (mut stalled, start) = (Stalled::default(), observe::now());
        let mut room_after = |time: Duration| {
            let now = start + time;
            stalled.update(&snapshot, now);
            let all = std::iter::once(Workers {
                workers: &workers,
                is_prefill: false,
            });
            Rooms::new(all, &settings, &Promised::default(), &stalled, now).room
        };
        let before = room_after(Duration::ZERO);
        let after = room_after(settings.stale_after);
        assert_eq!((before.is_full, after.is_full), (true, false));
        assert!(after.rate > 0);
        assert_eq!(after.rate, before.rate);
    }

    /// Else each request with a target that enters then would be refused.
    #[test]
    fn workers_whose_engines_ask_for_a_pause_are_as_fast_as_before_and_have_no_room() {
        let settings = Settings::default();
        let fleet = registry(&["a", "b"]);
        let snapshot = fleet.snapshot();
        let statuses = snapshot.workers.iter();
        let workers: Vec<Arc<Worker>> = statuses.map(|status| status.worker.clone()).collect();
        let _queued = InFlight::new(workers[0].clone(), 100, 0);
        let now = observe::now();
        let room = || {
            let all = std::iter::once(Workers {
                workers: &workers,
                is_prefill: false,
            });
            let (promised, stalled) = (Promised::default(), Stalled::default());
            Rooms::new(all, &settings, &promised, &stalled, now).room
        };
        let before = room();
        assert!(before.workers == 2 && before.rate > 0 && !before.is_full);
        for worker in &workers {
            worker.breaker.pause(now + Duration::from_secs(5));
        }
        let expected = queue::Room {
            counted_workers: 0,
            is_full: true,
            ..before
        };
        assert_eq!(room(), expected);
    }

    #[test]
    fn a_stalled_decode_worker_is_left_out_for_the_models_that_have_another_one() {
        let settings = Settings {
            max_worker_queued_tokens: 1_000,
            ..Settings::default()
        };
        let fleet = registry(&["a", "b"]);
        let snapshot = fleet.snapshot();
        let statuses = snapshot.workers.iter();
        let workers: Vec<Arc<Worker>> = statuses.map(|status| status.worker.clone()).collect();
        let _queued = InFlight::new(workers[0].clone(), 1_000, 0);
        let (mut stalled, start) = (Stalled::default(), observe::now());
        let later = start + settings.stale_after;
        stalled.update(&snapshot, start);
        stalled.update(&snapshot, later);
        let (both, alone) = (Model::from("both"), Model::from("alone"));
        let all = Workers {
            workers: &workers,
            is_prefill: false,
        };
        let first = Workers {
            workers: &workers[..1],
            ..all
        };
        let mut others = [(&both, all), (&alone, first)];
        for _ in 0..2 {
            let (of, promised) = (others.into_iter(), Promised::default());
            let rooms = Rooms::default().with_others(of, &settings, &promised, &stalled, later);
            assert_eq!(rooms.stalled(&both), [workers[0].id]);
            assert!(rooms.stalled(&alone).is_empty());
            assert!(rooms.room.others_have_room);
            // So one that waits for it goes elsewhere, and the other one waits on.
            assert!(!rooms.is_still_full(workers[0].id, &both));
            assert!(rooms.is_still_full(workers[0].id, &alone));
            others.reverse();
        }
    }

    fn with_ranks(ranks: usize) -> Arc<Worker> {
        let endpoint = Endpoint::Zmq {
            publisher: "tcp://*:5557".to_owned(),
            replay: None,
            topic: String::new(),
        };
        let listed = Member {
            events: Events::At(vec![endpoint; ranks]),
            ..member("a")
        };
        let fleet = registry(&[]);
        fleet.set_members("static", vec![listed]);
        fleet.snapshot().workers[0].worker.clone()
    }

    #[test]
    fn a_long_prompt_at_one_rank_keeps_no_request_from_an_idle_rank() {
        let settings = Settings {
            max_worker_queued_tokens: 1_000,
            ..Settings::default()
        };
        let worker = with_ranks(2);
        let rank = |rank| worker.id.cache_owner(Some(rank));
        let long = InFlight::new(worker.clone(), 5_000, 0).at_rank(Some(0));
        let mut promised = Promised::default();
        let is_open = |rank, promised: &Promised| {
            let rooms = Rooms {
                open: FxHashMap::from_iter([(worker.id, 2)]),
                ..Rooms::default()
            };
            rooms.is_open(&worker, rank, &settings, promised)
        };
        assert!(has_any_room(&worker, &settings, &promised));
        // One that is pinned to none may come to the rank with the long prompt.
        let open = [Some(0), Some(1), None].map(|rank| is_open(rank, &promised));
        assert_eq!(open, [false, true, false]);
        // Another one waits for the first rank, and then one for the second.
        let share = crate::fleet::load::LoadShare::of_request(10, 10);
        promised.add_waiting(&[(rank(0), share)]);
        assert!(is_open(Some(1), &promised));
        promised.add_waiting(&[(rank(1), share)]);
        assert!(!has_any_room(&worker, &settings, &promised));
        drop(long);
        assert!(!is_open(Some(1), &promised));
    }

    #[test]
    fn a_worker_whose_slots_are_taken_is_stalled_once_its_reports_stay_the_same() {
        let listed = Member {
            slots: std::num::NonZeroU32::new(2),
            ..member("a")
        };
        let fleet = registry(&[]);
        fleet.set_members("static", vec![listed]);
        let (settings, snapshot) = (Settings::default(), fleet.snapshot());
        let worker = snapshot.workers[0].worker.clone();
        let running: Vec<_> = (0..3)
            .map(|_| InFlight::new(worker.clone(), 10, 10))
            .collect();
        let (mut stalled, start) = (Stalled::default(), observe::now());
        let mut is_stalled_after = |seconds| {
            let now = start + Duration::from_secs(seconds);
            stalled.update(&snapshot, now);
            stalled.is_full_and_stalled(&worker, &settings, now)
        };
        // Answers that are not streamed show nothing without reports.
        assert!(!is_stalled_after(0) && !is_stalled_after(31));
        worker.load.report(LoadReport {
            at: start,
            running: 3,
            waiting: 0,
            deferred: 0,
            kv_usage: 0.5,
        });
        assert!(!is_stalled_after(40) && is_stalled_after(71));
        drop(running);
        assert!(!is_stalled_after(72));
    }

    #[test]
    fn a_worker_has_the_room_of_all_its_ranks() {
        let settings = Settings {
            max_worker_queued_tokens: 1_000,
            ..Settings::default()
        };
        for (ranks, most) in [(1, 1_000), (4, 4_000)] {
            let worker = with_ranks(ranks);
            let is_open = || has_room(&worker, None, &settings, None);
            let first = InFlight::new(worker.clone(), most - 1, 0);
            assert!(is_open(), "{ranks}");
            let last = InFlight::new(worker.clone(), 1, 0);
            assert!(!is_open(), "{ranks}");
            drop((first, last));
            assert_eq!(worker.slots() as usize, 256 * ranks);
            // Slots that were seen are those of all ranks.
            for _ in 0..4 {
                worker.load.report(LoadReport {
                    at: observe::now(),
                    running: 64,
                    waiting: 3,
                    deferred: 0,
                    kv_usage: 0.0,
                });
            }
            assert_eq!(worker.slots(), 64, "{ranks}");
        }
    }
}
