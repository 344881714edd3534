//! What batches may have of a fleet: how many requests of the lowest class a model's workers would take now without
//! making others wait, and where lines that run are to give way. Both are functions of numbers; the rest reads these.

use std::sync::Arc;
use std::time::Instant;

use rustc_hash::FxHashMap;

use super::choose::promised::Promise;
use super::core::Relay;
use super::request::batch_line::LinesByWorker;
use crate::fleet::load::TriedRequests;
use crate::fleet::waiting::WaitingByOwner;
use crate::fleet::{Group, Snapshot, Worker, with_different_members};
use crate::ids::WorkerId;
use crate::observe;

/// Of the slots that others leave free, batches leave one in so many, for requests that come meanwhile.
const FREE_SHARE: u32 = 8;

/// Beside people a line is let in while so many slots stay free, in an engine of 16 or more. With one, a person's request
/// that comes makes a line give way at once. At 30, 60 and 90 % of what two simulated engines of 16 slots can do, 0.4, 5.0
/// and 3.6 lines a second gave way with one, and 0.4, 2.2 and 1.5 with two; 11.8, 5.4 and 0.45 a second ended with both.
const KEPT_FREE: u32 = 2;

/// Seconds of prompts that may be queued at a model's only worker to which another line is sent. A request that comes
/// then waits as long for its first token, and for the prompt of that line.
const QUEUED_SECONDS: f64 = 0.02;

/// The same for one of several workers. A request that comes then is sent to one of those that are free of lines' prompts.
/// Beside people at 30 % of what two simulated engines of 64 slots can do, 0.02 let 10 lines a second run and 0.06 let 20;
/// the p99 of the people's times to the first token was 0.13 s with both, the median 0.064 and 0.077 s.
const QUEUED_SECONDS_OF_SEVERAL: f64 = 0.05;

/// What workers leave over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpareRoom {
    /// Requests.
    pub requests: u32,
    /// Prompt tokens to compute of all of these together.
    pub prompt_tokens: u64,
    /// Workers that have some.
    pub workers: u32,
}

impl SpareRoom {
    fn plus(self, other: Self) -> Self {
        Self {
            requests: self.requests.saturating_add(other.requests),
            prompt_tokens: self.prompt_tokens.saturating_add(other.prompt_tokens),
            workers: self.workers.saturating_add(other.workers),
        }
    }

    /// What workers leave over together. Beside requests of people (`has_people`) the prompts of lines take half of the
    /// workers at most, so that a request that comes is sent where no prompt of a line is before its own. Where people's
    /// own prompts take that half, one worker gets a line while more than a quarter computes none.
    fn of_workers(workers: &[WorkerNumbers], has_people: bool) -> Self {
        let rooms = workers.iter().map(WorkerNumbers::room);
        let room = rooms.fold(Self::default(), Self::plus);
        if !has_people || workers.len() < 2 {
            return room;
        }
        let is_free = |worker: &&WorkerNumbers| worker.queued_tokens == 0;
        let free = workers.iter().filter(is_free).count();
        let half = (workers.len() / 2).saturating_sub(workers.len() - free);
        let least = usize::from(free > (workers.len() / 4).max(1));
        room.of_at_most(half.max(least) as u32)
    }

    /// With the prompts of so many workers.
    fn of_at_most(self, workers: u32) -> Self {
        let workers = workers.min(self.workers);
        if workers == 0 {
            return Self::default();
        }
        Self {
            prompt_tokens: self.prompt_tokens / u64::from(self.workers) * u64::from(workers),
            workers,
            ..self
        }
    }

    /// Of pairs of a prefill and a decode worker: each request needs both.
    fn of_pairs(prefill: Self, decode: Self) -> Self {
        Self {
            requests: prefill.requests.min(decode.requests),
            ..prefill
        }
    }

    /// What one of so many replicas may use. Rounded down: each sees the lines of the others a moment later, and what
    /// all let in too much would have to give way again. A replica that `has_lines` none gets one, if there is room.
    fn shared_by(self, replicas: u32, has_lines: bool) -> Self {
        let replicas = replicas.max(1);
        let least = if has_lines { 0 } else { self.requests.min(1) };
        Self {
            requests: (self.requests / replicas).max(least),
            prompt_tokens: self.prompt_tokens.div_ceil(replicas.into()),
            workers: self.workers.div_ceil(replicas),
        }
    }
}

/// Workers that have no room for lines beside requests of people, by what they do for a request.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct FullWorkers {
    pub(super) prefill: Vec<WorkerId>,
    pub(super) decode: Vec<WorkerId>,
}

impl FullWorkers {
    pub(super) fn has_any(&self) -> bool {
        !self.prefill.is_empty() || !self.decode.is_empty()
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct WorkerNumbers {
    /// Requests in flight, of all clients.
    requests: u32,
    /// Those of them that the engine's last report has beyond those of this router and its replicas.
    foreign: u32,
    /// Those of them that are this router's.
    own: u32,
    /// Those of these that are lines of batches. Of a pair, lines count at the decode worker.
    lines: u32,
    /// Answers that it generates at a time, if that is set or was seen.
    slots: Option<u32>,
    /// What it was tried with; counts while its slots are not known.
    tried: TriedRequests,
    /// Requests that wait inside its engine for a slot or for memory, as of its last report. While it is not known that
    /// slots are free, all that wait may wait for one.
    waiting_inside: u32,
    /// Requests that wait in routers for room here, and not for another worker to compute their prompt.
    waiting_outside: u32,
    /// Prompt tokens that it has accepted and not computed yet.
    queued_tokens: u64,
    /// Prompt tokens that it computes in a second.
    rate: f64,
    /// Seconds of prompts that may be queued where another line is sent.
    queued_seconds: f64,
    /// With more queued tokens than this, requests wait for it in the router's queue, if there is one.
    max_queued_tokens: Option<u64>,
}

impl WorkerNumbers {
    fn room(&self) -> SpareRoom {
        let max_queued = (self.rate * self.queued_seconds) as u64;
        // Half of what makes others wait.
        let max_queued = self
            .max_queued_tokens
            .map_or(max_queued, |max| max_queued.min(max / 2))
            .max(1);
        let has_waiting = self.waiting_inside > 0 || self.waiting_outside > 0;
        if has_waiting || self.queued_tokens >= max_queued {
            return SpareRoom::default();
        }
        match self.most_let_in().saturating_sub(self.lines) {
            0 => SpareRoom::default(),
            requests => SpareRoom {
                requests,
                prompt_tokens: max_queued - self.queued_tokens,
                workers: 1,
            },
        }
    }

    /// Requests that are no lines.
    fn others(&self) -> u32 {
        self.requests.saturating_sub(self.lines)
    }

    /// Whether requests of people run there that came to this router. Lines of other replicas look like these.
    fn has_people(&self) -> bool {
        self.own > self.lines
    }

    /// What an engine has not shown to have is tried with lines alone: people's requests would wait for a slot, too.
    fn slots_for_lines(&self) -> u32 {
        let shown = self.tried.shown.filter(|_| self.has_people());
        self.slots.or(shown).unwrap_or(self.tried.most)
    }

    /// Whether another line would take what people's requests have or want. Where there are lines alone, the choice knows
    /// better whether a line waits there or computes its prompt elsewhere.
    fn is_full_beside_people(&self) -> bool {
        let has_people = self.has_people() || self.waiting_outside > 0;
        has_people && self.room().requests == 0
    }

    /// Lines that others leave room for.
    fn most_lines(&self, slots: u32) -> u32 {
        let free = slots.saturating_sub(self.others());
        // Lines may have the last free one: then it is not left idle.
        (free - free.div_ceil(FREE_SHARE)).max(free.min(1))
    }

    /// Lines after which no other is let in.
    fn most_let_in(&self) -> u32 {
        let slots = self.slots_for_lines();
        let most = self.most_lines(slots);
        if !self.has_people() {
            return most;
        }
        let free = slots.saturating_sub(self.others());
        most.min(free.saturating_sub(KEPT_FREE.min(slots / FREE_SHARE)))
    }

    /// Lines that are to give way. One slot stays free beside other requests, if lines leave any: giving way takes a
    /// step of the engine. Where there are lines alone, none has to: they may wait for each other inside the engine.
    fn wanted(&self) -> u32 {
        let Some(slots) = self.slots.or(self.tried.shown) else {
            return 0;
        };
        // Without foreign requests: a line that has just ended is one until the engine's next report.
        let own = Self {
            requests: self.requests.saturating_sub(self.foreign),
            ..*self
        };
        if own.others() == 0 && self.waiting_outside == 0 {
            return 0;
        }
        let left = slots.saturating_sub(own.others());
        let spare = left.saturating_sub(own.most_lines(slots)).min(1);
        let wanted = own.requests.saturating_add(self.waiting_outside);
        let wanted = wanted.saturating_add(spare).saturating_sub(slots);
        wanted.min(self.lines)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum WorkerPart {
    Whole,
    Prefill,
    Decode,
}

impl Relay {
    /// How many requests of the lowest class the workers of a model, or of what a name stands for, would take now
    /// without making others wait. `lines`: those of this router that run. Lines that were let in and do not count at a
    /// worker yet are not taken off.
    pub fn spare_room(&self, model: &str, lines: &LinesByWorker) -> SpareRoom {
        let snapshot = self.fleet().snapshot();
        let now = observe::now();
        let room = |model: &str| self.room_of_model(&snapshot, model, lines, now);
        let Some(name) = self.names().get(model) else {
            return room(model);
        };
        // A request may go to any of the targets, so each must have room.
        let targets = name.targets().filter(|(_, weight)| *weight > 0.0);
        let rooms = targets.map(|(model, _)| room(model));
        rooms
            .min_by_key(|room| (room.requests, room.prompt_tokens))
            .unwrap_or_default()
    }

    /// Workers that others want more of than lines leave them, and how many lines of this router are to give way
    /// there. `entering`: lines that were let in and do not count at a worker yet; some of them may wait in the queue.
    pub fn lines_to_give_way(&self, lines: &LinesByWorker, entering: u32) -> Vec<(WorkerId, u32)> {
        let snapshot = self.fleet().snapshot();
        let promised = self.queues().promised();
        let peers = self.fleet().waiting().peers();
        let replicas = self.replicas();
        let mut with_lines: FxHashMap<WorkerId, (&Arc<Worker>, WorkerPart)> = FxHashMap::default();
        for group in with_different_members(snapshot.models.values()) {
            let part = self.decode_part(group);
            let workers = group.workers.iter();
            for worker in workers.filter(|worker| lines.contains_key(&worker.id)) {
                // That of the first group counts.
                with_lines.entry(worker.id).or_insert((worker, part));
            }
        }
        let wanted = lines.iter().filter_map(|(id, at_worker)| {
            let (worker, part) = *with_lines.get(id)?;
            let own = promised.as_deref().map(|promised| promised.of(*id));
            let own = people_in_line(own.unwrap_or_default(), entering);
            let numbers = WorkerNumbers {
                waiting_outside: own.saturating_add(waiting_at_peers(peers.as_deref(), *id, part)),
                ..self.numbers_of(worker, part, *at_worker)
            };
            // The other replicas' lines there give way as well.
            let wanted = numbers.wanted().div_ceil(replicas);
            (wanted > 0).then_some((*id, wanted))
        });
        wanted.collect()
    }

    fn room_of_model(
        &self,
        snapshot: &Snapshot,
        model: &str,
        lines: &LinesByWorker,
        now: Instant,
    ) -> SpareRoom {
        let Some(group) = snapshot.models.get(model) else {
            return SpareRoom::default();
        };
        let queue = self.queues().get(&group.model);
        if queue.is_some_and(|queue| queue.waiting() > 0) {
            return SpareRoom::default();
        }
        let usable = |part| -> Vec<WorkerNumbers> {
            let usable = self.usable_for_lines(group, part, lines, now);
            usable.map(|(_, numbers)| numbers).collect()
        };
        let decode = usable(self.decode_part(group));
        let has_people = decode.iter().any(WorkerNumbers::has_people);
        let mut room = SpareRoom::of_workers(&decode, has_people);
        if self.splits(group) {
            let prefill = SpareRoom::of_workers(&usable(WorkerPart::Prefill), has_people);
            room = SpareRoom::of_pairs(prefill, room);
        }
        let prefill = group.prefill_workers();
        let mut workers = prefill.iter().chain(group.decode_workers());
        let has_lines = workers.any(|worker| lines.contains_key(&worker.id));
        room.shared_by(self.replicas(), has_lines)
    }

    /// The workers of a group that have no room for lines beside people's requests.
    /// `lines`: those of this router that run.
    pub(super) fn full_beside_people(&self, group: &Group, lines: &LinesByWorker) -> FullWorkers {
        let now = observe::now();
        let full = |part| {
            let usable = self.usable_for_lines(group, part, lines, now);
            let full = usable.filter(|(_, numbers)| numbers.is_full_beside_people());
            full.map(|(id, _)| id).collect()
        };
        let prefill = self.splits(group).then(|| full(WorkerPart::Prefill));
        FullWorkers {
            prefill: prefill.unwrap_or_default(),
            decode: full(self.decode_part(group)),
        }
    }

    /// Whether the requests of a group are split over a prefill and a decode worker.
    fn splits(&self, group: &Group) -> bool {
        self.prefill_decode.is_some() && !group.prefill_workers().is_empty()
    }

    /// What is asked of the workers of a group that generate answers.
    fn decode_part(&self, group: &Group) -> WorkerPart {
        if self.splits(group) {
            WorkerPart::Decode
        } else {
            WorkerPart::Whole
        }
    }

    /// The workers of a group that do a part and that circuit breakers admit, with what is known of them.
    fn usable_for_lines<'a>(
        &'a self,
        group: &'a Group,
        part: WorkerPart,
        lines: &'a LinesByWorker,
        now: Instant,
    ) -> impl Iterator<Item = (WorkerId, WorkerNumbers)> + 'a {
        let waiting = self.fleet().waiting().peers();
        let workers = match part {
            WorkerPart::Prefill => group.prefill_workers(),
            WorkerPart::Whole | WorkerPart::Decode => group.decode_workers(),
        };
        let usable = workers.iter().filter(|worker| {
            let sends_blocks = part == WorkerPart::Prefill;
            worker.breaker.may_admit(now)
                && (!sends_blocks || worker.kv_transfer_breaker.may_admit(now))
        });
        let usable: Vec<&Arc<Worker>> = usable.collect();
        let queued_seconds = match usable.len() {
            1 => QUEUED_SECONDS,
            _ => QUEUED_SECONDS_OF_SEVERAL,
        };
        usable.into_iter().map(move |worker| {
            let at_worker = lines.get(&worker.id).copied().unwrap_or_default();
            let numbers = WorkerNumbers {
                waiting_outside: waiting_at_peers(waiting.as_deref(), worker.id, part),
                queued_seconds,
                ..self.numbers_of(worker, part, at_worker)
            };
            (worker.id, numbers)
        })
    }

    /// Replicas of this router, with it.
    fn replicas(&self) -> u32 {
        self.peers.connected().saturating_add(1)
    }

    /// Without what waits for it in routers.
    fn numbers_of(&self, worker: &Worker, part: WorkerPart, lines: u32) -> WorkerNumbers {
        let load = &worker.load;
        let max_of_rank = self
            .queue
            .as_ref()
            .map(|queue| queue.max_worker_queued_tokens);
        let (slots, tried) = (worker.known_slots(), load.tried());
        let seen_slots = slots.or(tried.shown).unwrap_or(0);
        WorkerNumbers {
            requests: load.requests(),
            foreign: load.foreign_requests(),
            own: load.own_requests(),
            lines,
            slots,
            tried,
            waiting_inside: load
                .reported()
                .map_or(0, |report| report.waiting_for_capacity(Some(seen_slots))),
            waiting_outside: 0,
            // Its prompts are computed by another worker.
            queued_tokens: match part {
                WorkerPart::Decode => 0,
                WorkerPart::Whole | WorkerPart::Prefill => load.queued_tokens(),
            },
            rate: load.speed.get().rate(),
            queued_seconds: QUEUED_SECONDS,
            max_queued_tokens: max_of_rank.map(|max| max.saturating_mul(worker.ranks().into())),
        }
    }
}

/// Requests that wait for room at a worker and are no lines, as far as is known. `entering`: lines, some of which may
/// wait. At a decode worker they are taken to be among those that wait for a prefill worker. A line that waits for the
/// decode worker itself counts as another request: rather one line too many gives way.
fn people_in_line(promise: Promise, entering: u32) -> u32 {
    let people = promise.waiting.requests.saturating_sub(entering);
    people.min(promise.in_line)
}

/// Requests that wait in other replicas for a worker. Replicas report the requests of pairs at both workers, and at the
/// decode worker without tokens to compute: they wait for the prefill worker.
fn waiting_at_peers(by_owner: Option<&WaitingByOwner>, worker: WorkerId, part: WorkerPart) -> u32 {
    let waiting = by_owner.and_then(|waiting| waiting.get(&worker));
    let waiting = waiting.copied().unwrap_or_default();
    match part {
        WorkerPart::Decode => {
            let tokens = u32::try_from(waiting.queued_tokens).unwrap_or(u32::MAX);
            waiting.requests.min(tokens)
        }
        WorkerPart::Whole | WorkerPart::Prefill => waiting.requests,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::fleet::load::LoadShare;

    /// Of 10,000 tokens a second: 200 may be queued.
    const IDLE: WorkerNumbers = WorkerNumbers {
        requests: 0,
        foreign: 0,
        own: 0,
        lines: 0,
        slots: Some(100),
        tried: TriedRequests::FIRST,
        waiting_inside: 0,
        waiting_outside: 0,
        queued_tokens: 0,
        rate: 10_000.0,
        queued_seconds: QUEUED_SECONDS,
        max_queued_tokens: None,
    };

    fn room(requests: u32, prompt_tokens: u64, workers: u32) -> SpareRoom {
        SpareRoom {
            requests,
            prompt_tokens,
            workers,
        }
    }

    type Change = fn(&mut WorkerNumbers);

    impl WorkerNumbers {
        /// So many requests run there, with so many lines among them.
        fn run(&mut self, requests: u32, lines: u32) {
            (self.requests, self.lines) = (requests, lines);
        }
    }

    #[test]
    fn lines_get_seven_of_eight_slots_that_others_leave_free_while_none_waits() {
        let none = (0, 0);
        let table: [(&str, Change, (u32, u64)); 16] = [
            ("idle", |_| {}, (87, 200)),
            ("some run", |of| of.run(60, 0), (35, 200)),
            ("lines run beside them", |of| of.run(70, 10), (25, 200)),
            ("lines have their share", |of| of.run(95, 35), none),
            ("one slot is free", |of| of.run(99, 0), (1, 200)),
            ("all slots are used", |of| of.run(120, 0), none),
            ("some wait inside", |of| of.waiting_inside = 1, none),
            ("some wait for it", |of| of.waiting_outside = 1, none),
            ("few tokens wait", |of| of.queued_tokens = 50, (87, 150)),
            ("many do", |of| of.queued_tokens = 200, none),
            ("it is fast", |of| of.rate = 47_000.0, (87, 940)),
            ("it is very slow", |of| of.rate = 1.0, (87, 1)),
            (
                "the queue has less",
                |of| of.max_queued_tokens = Some(100),
                (87, 50),
            ),
            ("one slot", |of| of.slots = Some(1), (1, 200)),
            ("it has shown no slots", |of| of.slots = None, (7, 200)),
            (
                "and others have more than it was tried with",
                |of| (of.slots, of.requests) = (None, 9),
                none,
            ),
        ];
        for (what, change, (requests, prompt_tokens)) in table {
            let mut numbers = IDLE;
            change(&mut numbers);
            let workers = requests.min(1);
            let expected = room(requests, prompt_tokens, workers);
            assert_eq!(numbers.room(), expected, "{what}");
        }
    }

    #[test]
    fn beside_people_a_line_is_let_in_while_two_slots_stay_free_in_a_larger_engine() {
        let let_in = |slots, people| {
            let numbers = WorkerNumbers {
                slots: Some(slots),
                requests: people,
                own: people,
                ..IDLE
            };
            numbers.room().requests
        };
        // People's requests, and lines that are let in beside them.
        let table = [(4, 10), (8, 6), (13, 1), (14, 0), (15, 0), (16, 0)];
        for (people, lines) in table {
            assert_eq!(let_in(16, people), lines, "{people} of 16");
        }
        assert_eq!((let_in(8, 6), let_in(8, 7)), (1, 0));
        assert_eq!((let_in(4, 3), let_in(2, 1), let_in(1, 0)), (1, 1, 1));
        // Without people the last one is not left idle.
        assert_eq!(let_in(16, 0), 14);
    }

    #[test]
    fn lines_give_way_until_one_slot_is_free() {
        // Slots, requests, foreign requests, lines, and requests that wait for it.
        let hundred = Some(100);
        let table = [
            ("idle", hundred, [0, 0, 0, 0], 0),
            ("there are lines alone", hundred, [100, 0, 100, 0], 0),
            ("lines have just ended", hundred, [110, 20, 40, 0], 0),
            ("two are free", hundred, [98, 0, 40, 0], 0),
            ("none is free", hundred, [100, 0, 40, 0], 1),
            ("some wait for it", hundred, [100, 0, 40, 6], 7),
            ("it got more than it runs", hundred, [105, 0, 40, 0], 6),
            ("there are only so many", hundred, [150, 0, 3, 0], 3),
            ("no line leaves a slot free", hundred, [100, 0, 1, 0], 0),
            ("its only slot is wanted", Some(1), [1, 0, 1, 1], 1),
            ("it has shown no slots", None, [50, 0, 40, 0], 0),
        ];
        for (what, slots, [requests, foreign, lines, waiting_outside], expected) in table {
            let numbers = WorkerNumbers {
                slots,
                requests,
                foreign,
                lines,
                waiting_outside,
                ..IDLE
            };
            assert_eq!(numbers.wanted(), expected, "{what}");
        }
    }

    #[test]
    fn beside_people_lines_leave_half_of_the_workers_free_of_their_prompts() {
        const PEOPLE: WorkerNumbers = WorkerNumbers {
            requests: 20,
            own: 20,
            ..IDLE
        };
        const BUSY: WorkerNumbers = WorkerNumbers {
            queued_tokens: 50,
            ..PEOPLE
        };
        let none = SpareRoom::default();
        let of = |busy: usize, people: usize, idle: usize| {
            [vec![BUSY; busy], vec![PEOPLE; people], vec![IDLE; idle]].concat()
        };
        let table = [
            ("there are lines alone", of(0, 0, 4), room(348, 800, 4)),
            ("one worker", of(0, 1, 0), room(70, 200, 1)),
            ("one that computes a prompt", of(1, 0, 0), room(70, 150, 1)),
            ("people are at all of four", of(0, 4, 0), room(280, 400, 2)),
            ("people are at one of four", of(0, 1, 3), room(331, 400, 2)),
            ("one of four computes", of(1, 3, 0), room(280, 187, 1)),
            ("two of four do", of(2, 2, 0), room(280, 175, 1)),
            ("three of four do", of(3, 1, 0), none),
            ("one of two does", of(1, 1, 0), none),
            ("five of eight do", of(5, 3, 0), room(560, 168, 1)),
            ("six of eight do", of(6, 2, 0), none),
        ];
        for (what, workers, expected) in table {
            let has_people = workers.iter().any(WorkerNumbers::has_people);
            let found = SpareRoom::of_workers(&workers, has_people);
            assert_eq!(found, expected, "{what}");
        }
    }

    #[test]
    fn an_engine_gets_more_than_it_has_shown_to_run_only_while_it_has_lines_alone() {
        let start = observe::now();
        let mut tried = TriedRequests::FIRST;
        tried.on_report(start, 16, true, 18);
        tried.on_report(start + Duration::from_secs(60), 16, false, 16);
        assert_eq!((tried.most, tried.shown), (18, Some(16)));
        let lines = WorkerNumbers {
            slots: None,
            tried,
            requests: 14,
            own: 14,
            lines: 14,
            ..IDLE
        };
        assert_eq!(lines.room().requests, 1);
        let one_of_people = WorkerNumbers { lines: 13, ..lines };
        assert_eq!(one_of_people.room().requests, 0);
        let full = WorkerNumbers {
            requests: 16,
            own: 16,
            ..one_of_people
        };
        assert_eq!(full.wanted(), 1);
    }

    #[test]
    fn a_line_keeps_away_from_a_full_worker_where_people_are() {
        // Requests, own and foreign ones, and lines.
        let table = [
            ("idle", [0, 0, 0, 0], false),
            ("people leave room", [60, 60, 0, 0], false),
            ("people have all", [100, 100, 0, 0], true),
            ("lines have their share", [95, 95, 0, 35], true),
            ("there are lines alone", [100, 100, 0, 100], false),
            ("and lines of another replica", [100, 60, 0, 60], false),
            ("and lines that have just ended", [110, 100, 10, 100], false),
        ];
        let numbers = |[requests, own, foreign, lines]: [u32; 4]| WorkerNumbers {
            requests,
            own,
            foreign,
            lines,
            ..IDLE
        };
        for (what, counts, expected) in table {
            let found = numbers(counts).is_full_beside_people();
            assert_eq!(found, expected, "{what}");
        }
        let people_wait = WorkerNumbers {
            waiting_outside: 1,
            ..numbers([100, 100, 0, 100])
        };
        assert!(people_wait.is_full_beside_people());
        let prompt_of_people = WorkerNumbers {
            queued_tokens: 200,
            ..numbers([1, 1, 0, 0])
        };
        assert!(prompt_of_people.is_full_beside_people());
    }

    /// Else lines would be let in and give way again at once.
    #[test]
    fn what_was_let_in_does_not_give_way() {
        for slots in 1..300 {
            for others in 0..slots + 3 {
                let mut numbers = WorkerNumbers {
                    requests: others,
                    slots: Some(slots),
                    ..IDLE
                };
                let entered = numbers.room().requests;
                numbers.requests += entered;
                numbers.lines += entered;
                assert_eq!(numbers.wanted(), 0, "{slots} slots, {others} others");
                assert_eq!(numbers.room(), SpareRoom::default());
            }
        }
    }

    #[test]
    fn lines_that_enter_are_first_taken_off_what_waits_for_another_worker() {
        // Requests that wait, those of them that wait for room here, and lines that enter.
        let table = [
            ("none waits", (0, 0, 3), 0),
            ("all wait here", (5, 5, 0), 5),
            ("a few of them are lines", (5, 5, 2), 3),
            ("there are lines alone", (5, 5, 7), 0),
            ("lines wait for a prefill worker", (8, 5, 3), 5),
            ("some of them do", (8, 5, 4), 4),
            ("none waits here", (8, 0, 3), 0),
        ];
        for (what, (requests, in_line, entering), expected) in table {
            let waiting = LoadShare {
                requests,
                ..LoadShare::default()
            };
            let promise = Promise {
                all: waiting,
                waiting,
                in_line,
            };
            assert_eq!(people_in_line(promise, entering), expected, "{what}");
        }
    }

    #[test]
    fn each_request_of_a_pair_needs_both_workers() {
        let found = SpareRoom::of_pairs(room(9, 500, 2), room(4, 90_000, 3));
        assert_eq!(found, room(4, 500, 2));
    }

    #[test]
    fn replicas_share_what_is_left() {
        let all = room(5, 1_000, 2).plus(room(2, 200, 1));
        assert_eq!(all, room(7, 1_200, 3));
        assert_eq!(all.shared_by(3, true), room(2, 400, 1));
        assert_eq!(all.shared_by(9, true), room(0, 134, 1));
        assert_eq!(all.shared_by(9, false), room(1, 134, 1));
        assert_eq!(all.shared_by(0, true), all);
        let none = SpareRoom::default();
        assert_eq!(none.shared_by(2, false), none);
    }
}
