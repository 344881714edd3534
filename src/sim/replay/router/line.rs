//! The requests that wait in a replay's router for the worker where they cost the least: the router's own queue, without classes,
//! tenants and bounds. Pure.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::fleet;
use crate::fleet::load::LoadShare;
use crate::fleet::waiting::{DueTime, FirstInLine};
use crate::ids::{ClientKey, WorkerId};
use crate::queue::{
    InLine, LOOKED_AT_IN_ORDER, LetFirst, Look, Outcome, PASSED_OVER_FOR, Patience, PlaceInLine,
    Queue, Request, Room, Settings, Stretch, Timing, Turn,
};

/// Longer than any replay.
const NEVER: Duration = Duration::from_secs(365 * 86_400);

#[derive(Debug)]
pub(super) struct Line {
    queue: Queue<usize>,
    lines: WorkerLines,
    max_worker_queued_tokens: u64,
    epoch: Instant,
}

/// The waiting requests, each in the line of the worker for which it was last seen to wait.
#[derive(Debug)]
struct WorkerLines {
    waiting: FxHashMap<usize, WaitingJob>,
    /// By worker: what waits for it.
    promised: Vec<LoadShare>,
    in_line: InLine,
    /// The first ones in other replicas' lines that are let go first.
    let_first: LetFirst,
}

#[derive(Debug)]
struct WaitingJob {
    seen: Seen,
    /// The line of the worker where it was seen.
    place: Cell<Option<PlaceInLine>>,
    patience: Patience,
}

/// The worker for which a request was last seen to wait.
#[derive(Clone, Copy, Debug)]
struct Seen {
    worker: usize,
    load: LoadShare,
    at: Duration,
}

impl WorkerLines {
    /// Puts a new request into its line.
    fn add(&mut self, request: usize, seen: Seen, due: DueTime, patience: Patience) {
        let place = (owner_of(seen.worker), due);
        self.in_line.add(place);
        self.promised[seen.worker] = self.promised[seen.worker].plus(seen.load);
        let job = WaitingJob {
            seen,
            place: Cell::new(Some(place)),
            patience,
        };
        self.waiting.insert(request, job);
    }

    /// Puts a request into the line where it waits now.
    fn set(&mut self, request: usize, seen: Seen, due: DueTime) {
        let Some(job) = self.waiting.get_mut(&request) else {
            return;
        };
        let before = std::mem::replace(&mut job.seen, seen);
        self.promised[before.worker] = self.promised[before.worker].minus(before.load);
        self.promised[seen.worker] = self.promised[seen.worker].plus(seen.load);
        let place = (owner_of(seen.worker), due);
        self.in_line.move_to(&job.place, Some(place));
    }

    fn remove(&mut self, request: usize) {
        if let Some(job) = self.waiting.remove(&request) {
            let Seen { worker, load, .. } = job.seen;
            self.promised[worker] = self.promised[worker].minus(load);
            self.in_line.move_to(&job.place, None);
        }
    }

    /// Whether a request whose `worker` has room is sent, by what is first in other replicas' lines there.
    fn turn(
        &mut self,
        now: Instant,
        request: usize,
        timing: Timing,
        worker: usize,
        first_of_peers: &[DueTime],
    ) -> Turn {
        let patience = &self.waiting[&request].patience;
        let (owner, in_line) = (owner_of(worker), &self.in_line);
        self.let_first
            .turn(now, patience, timing, owner, in_line, first_of_peers)
    }

    /// Whether a request that was seen in the line of a `worker` with room waits on beside it, without another look.
    fn waits_on(
        &mut self,
        now: Instant,
        request: usize,
        timing: Timing,
        worker: usize,
        first_of_peers: &[DueTime],
    ) -> bool {
        let patience = &self.waiting[&request].patience;
        let (owner, in_line) = (owner_of(worker), &self.in_line);
        self.let_first
            .waits_on(now, patience, timing, owner, in_line, first_of_peers)
    }
}

/// The id of a worker that has no ranks.
fn owner_of(worker: usize) -> WorkerId {
    WorkerId(worker as u32)
}

/// A request that is sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent {
    pub(crate) request: usize,
    pub(crate) worker: usize,
    pub(crate) uncached_tokens: u32,
}

/// What is known of the workers, by worker.
#[derive(Clone, Debug)]
pub(super) struct Workers {
    pub(super) loads: Vec<LoadShare>,
    /// What other replicas' waiting requests are promised.
    pub(super) promised: Vec<LoadShare>,
    /// The first of those in each other replica's line.
    pub(super) peers_first: Vec<FirstInLine>,
    pub(super) slots: Vec<Option<u32>>,
    /// Seconds for a prompt token at their mean rate.
    pub(super) mean_prompt_token: f64,
}

impl Workers {
    /// Whether one has room for one more request.
    fn has_room(&self, worker: usize, max_queued_tokens: u64) -> bool {
        let load = &self.loads[worker];
        let is_free = |slots: u32| fleet::load::free_slots(slots, load.requests) > 0;
        load.queued_tokens < max_queued_tokens && self.slots[worker].is_none_or(is_free)
    }

    fn room(&self, max_queued_tokens: u64) -> Room {
        let mut all = 0..self.loads.len();
        Room {
            workers: self.loads.len() as u32,
            // They are the same all the time.
            counted_workers: 1,
            is_full: !all.any(|worker| self.has_room(worker, max_queued_tokens)),
            others_have_room: false,
            queued_tokens: self.loads.iter().map(|load| load.queued_tokens).sum(),
            rate: (1.0 / self.mean_prompt_token) as u64,
        }
    }
}

impl Line {
    pub(super) fn new(settings: &Settings, workers: usize, epoch: Instant) -> Self {
        let settings = Settings {
            max_wait: NEVER,
            max_requests: u32::MAX,
            max_size: u64::MAX,
            ..settings.clone()
        };
        Self {
            max_worker_queued_tokens: settings.max_worker_queued_tokens,
            queue: Queue::new(Arc::new(settings)),
            lines: WorkerLines {
                waiting: FxHashMap::default(),
                promised: vec![LoadShare::default(); workers],
                in_line: InLine::default(),
                let_first: LetFirst::default(),
            },
            epoch,
        }
    }

    /// What waits for each worker.
    pub(super) fn promised(&self) -> &[LoadShare] {
        &self.lines.promised
    }

    /// When the first one in each worker's line is due.
    pub(super) fn first(&self) -> Vec<Option<DueTime>> {
        let workers = 0..self.lines.promised.len();
        let first = |worker| self.lines.in_line.first(owner_of(worker));
        workers.map(first).collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Adds a request that would be sent to a worker now, with what it is there.
    pub(super) fn enter(
        &mut self,
        now: Duration,
        request: usize,
        (worker, load): (usize, LoadShare),
        workers: &Workers,
    ) {
        let arrived = self.epoch + now;
        let tokens = load.queued_tokens;
        let waiting = Request {
            priority: 0,
            client: ClientKey(0),
            tokens,
            compute: Duration::from_secs_f64(tokens as f64 * workers.mean_prompt_token),
            bytes: 0,
            client_bytes: 0,
            received: arrived,
            entered: arrived,
            since: arrived,
            ttft_target: None,
            is_background: false,
            deadline: arrived + NEVER,
            has_room: false,
            lacks_worker: false,
            has_lost_target: false,
        };
        let has_room = workers.has_room(worker, self.max_worker_queued_tokens);
        let had_room = has_room && self.lines.promised[worker].requests == 0;
        let seen = Seen {
            worker,
            load,
            at: now,
        };
        let due = self.queue.due(&waiting);
        self.lines.add(request, seen, due, Patience::new(had_room));
        let room = workers.room(self.max_worker_queued_tokens);
        let entered = self.queue.enter(arrived, room, waiting, request);
        entered.expect("nothing bounds it");
    }

    /// The requests whose workers have room, in their order: each is promised to the worker where it costs the least behind
    /// those that were promised before. `choose` says which one that is at such loads, with the tokens of the prompt and
    /// those to compute. Of very many only the first ones are looked at.
    pub(super) fn release(
        &mut self,
        now: Duration,
        mut workers: Workers,
        mut choose: impl FnMut(usize, &[LoadShare]) -> (usize, u32, u32),
    ) -> Vec<Sent> {
        let max = self.max_worker_queued_tokens;
        let Self {
            queue,
            lines,
            epoch,
            ..
        } = self;
        let at = *epoch + now;
        let peers_first = std::mem::take(&mut workers.peers_first);
        let first_of_peers = |owner: WorkerId| peers_first[owner.0 as usize].as_slice();
        lines.let_first.begin_walk(first_of_peers);
        let mut is_waited_for = vec![false; workers.loads.len()];
        let mut in_order = LOOKED_AT_IN_ORDER;
        let mut sent = Vec::new();
        let room = workers.room(max);
        let look = |request: &usize, timing: Timing, stretch: Stretch| {
            let is_open = |worker: usize| !is_waited_for[worker] && workers.has_room(worker, max);
            if stretch != Stretch::First || !(0..workers.loads.len()).any(is_open) {
                return Look::Full;
            }
            let before = lines.waiting[request].seen;
            let is_new = now - before.at < PASSED_OVER_FOR;
            if in_order == 0 && is_new {
                let has_room = is_open(before.worker);
                let firsts = &peers_first[before.worker];
                if !has_room || lines.waits_on(at, *request, timing, before.worker, firsts) {
                    workers.loads[before.worker] = workers.loads[before.worker].plus(before.load);
                    is_waited_for[before.worker] |= !has_room;
                    return Look::PassOver;
                }
            }
            in_order = in_order.saturating_sub(1);
            let behind = workers.loads.iter().zip(&workers.promised);
            let behind: Vec<LoadShare> = behind.map(|(load, peers)| load.plus(*peers)).collect();
            let (worker, prompt_tokens, uncached_tokens) = choose(*request, &behind);
            let seen = Seen {
                worker,
                load: LoadShare::of_request(prompt_tokens, uncached_tokens),
                at: now,
            };
            let has_room = is_open(worker);
            workers.loads[worker] = workers.loads[worker].plus(seen.load);
            if !has_room {
                lines.set(*request, seen, timing.due);
                is_waited_for[worker] = true;
                return Look::Wait;
            }
            let first_of_peers = &peers_first[worker];
            match lines.turn(at, *request, timing, worker, first_of_peers) {
                Turn::Next | Turn::Overtakes => {}
                // It waits beside its line, and those behind it may have room at other workers.
                Turn::Waits => {
                    lines.set(*request, seen, timing.due);
                    return Look::Wait;
                }
            }
            lines.remove(*request);
            sent.push(Sent {
                request: *request,
                worker,
                uncached_tokens,
            });
            Look::Send
        };
        let left = queue.advance(at, room, 0, look);
        debug_assert!(left.iter().all(|left| left.outcome == Outcome::Released));
        sent
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;

    const FULL: LoadShare = LoadShare {
        requests: 1,
        queued_tokens: 1_000,
        context_tokens: 1_000,
    };

    fn workers(loads: [LoadShare; 2], peers_first: Option<Instant>) -> Workers {
        Workers {
            loads: loads.to_vec(),
            promised: vec![LoadShare::default(); 2],
            peers_first: vec![FirstInLine::new(), first_at(peers_first)],
            slots: vec![None; 2],
            mean_prompt_token: 0.001,
        }
    }

    /// Another replica's first one, which is of the class of all requests.
    fn first_at(at: Option<Instant>) -> FirstInLine {
        let due = |at| DueTime { priority: 0, at };
        at.into_iter().map(due).collect()
    }

    fn line(epoch: Instant) -> Line {
        let settings = Settings {
            max_worker_queued_tokens: 1_000,
            ..Settings::default()
        };
        Line::new(&settings, 2, epoch)
    }

    fn sent(
        line: &mut Line,
        ms: u64,
        workers: &Workers,
        worker_of: impl Fn(usize) -> usize,
    ) -> Vec<usize> {
        let choose = |request, _: &[LoadShare]| (worker_of(request), 10, 10);
        let sent = line.release(Duration::from_millis(ms), workers.clone(), choose);
        sent.iter().map(|sent| sent.request).collect()
    }

    #[test]
    fn those_who_wait_for_a_full_worker_keep_nobody_from_an_idle_one() {
        let mut line = line(observe::now());
        let workers = workers([FULL, LoadShare::default()], None);
        let load = LoadShare::of_request(10, 10);
        let worker_of = |request: usize| usize::from(request == 100);
        for request in 0..=100 {
            line.enter(
                Duration::ZERO,
                request,
                (worker_of(request), load),
                &workers,
            );
        }
        assert_eq!(sent(&mut line, 0, &workers, worker_of), [100]);
        assert_eq!(line.promised()[0].requests, 100);
        assert_eq!(line.promised()[1], LoadShare::default());
    }

    #[test]
    fn a_request_lets_one_of_another_replica_go_first_for_a_second_if_that_is_due_earlier() {
        let epoch = observe::now();
        let load = LoadShare::of_request(10, 10);
        let idle = [LoadShare::default(); 2];
        // 10 tokens are computed in 10 ms, so it is due after 33 ms.
        for (due, expected) in [(20, [0, 0, 1]), (40, [1, 0, 0])] {
            let mut line = line(epoch);
            let peers_first = Some(epoch + Duration::from_millis(due));
            let busy = workers([FULL; 2], peers_first);
            line.enter(Duration::ZERO, 7, (1, load), &busy);
            assert_eq!(sent(&mut line, 0, &busy, |_| 1), [0_usize; 0]);
            let open = workers(idle, peers_first);
            let left = [50, 1_000, 1_060].map(|ms| sent(&mut line, ms, &open, |_| 1).len());
            assert_eq!(left, expected, "{due}");
        }
        // One that finds room when it arrives is sent all the same.
        let mut line = line(epoch);
        let open = workers(idle, Some(epoch));
        line.enter(Duration::ZERO, 7, (1, load), &open);
        assert_eq!(sent(&mut line, 0, &open, |_| 1), [7]);
        assert!(line.lines.waiting.is_empty() && line.first() == [None; 2]);
    }

    #[test]
    fn whoever_waits_beside_a_line_is_in_the_line_of_no_other_worker_any_more() {
        let epoch = observe::now();
        let load = LoadShare::of_request(10, 10);
        let mut line = line(epoch);
        let busy = workers([FULL; 2], None);
        for request in 0..10 {
            line.enter(Duration::ZERO, request, (0, load), &busy);
        }
        let open = workers([LoadShare::default(); 2], Some(epoch));
        assert_eq!(sent(&mut line, 10, &open, |_| 1), [0_usize; 0]);
        let in_line = [0, 1].map(|worker: usize| line.promised()[worker].requests);
        let has_first = [0, 1].map(|worker: usize| line.first()[worker].is_some());
        assert_eq!((in_line, has_first), ([0, 10], [false, true]));
    }

    #[test]
    fn of_many_that_let_another_go_first_only_some_are_looked_at_each_time() {
        let epoch = observe::now();
        let load = LoadShare::of_request(10, 10);
        let mut line = line(epoch);
        let busy = workers([FULL; 2], None);
        for request in 0..100 {
            line.enter(Duration::ZERO, request, (1, load), &busy);
        }
        let open = workers([LoadShare::default(); 2], Some(epoch));
        let looks = Cell::new(0);
        let worker_of = |_: usize| {
            looks.set(looks.get() + 1);
            1
        };
        assert_eq!(sent(&mut line, 10, &open, worker_of), [0_usize; 0]);
        assert!((1..=32).contains(&looks.get()), "{looks:?}");
    }

    #[test]
    fn all_requests_together_let_one_that_does_not_leave_go_first_for_a_second() {
        let epoch = observe::now();
        let load = LoadShare::of_request(10, 10);
        let mut line = line(epoch);
        let open = workers([LoadShare::default(); 2], Some(epoch));
        let busy = workers([FULL; 2], None);
        line.enter(Duration::ZERO, 7, (1, load), &busy);
        assert_eq!(sent(&mut line, 50, &open, |_| 1), [0_usize; 0]);
        line.enter(Duration::from_millis(600), 8, (1, load), &open);
        assert_eq!(sent(&mut line, 600, &open, |_| 1), [0_usize; 0]);
        assert_eq!(sent(&mut line, 1_050, &open, |_| 1), [7, 8]);
    }

    #[test]
    fn a_request_lets_all_that_come_to_another_replica_go_first_for_a_second_together() {
        let epoch = observe::now();
        let load = LoadShare::of_request(10, 10);
        let mut line = line(epoch);
        let busy = workers([FULL; 2], None);
        // It is due after all that come there.
        line.enter(Duration::from_millis(1_500), 7, (1, load), &busy);
        for (ms, expected) in [(1_500, 0), (2_000, 0), (2_490, 0), (2_500, 1)] {
            // Each time another one is first there.
            let first = epoch + Duration::from_millis(ms - 1_500);
            let open = workers([LoadShare::default(); 2], Some(first));
            assert_eq!(sent(&mut line, ms, &open, |_| 1).len(), expected, "{ms}");
        }
    }
}
