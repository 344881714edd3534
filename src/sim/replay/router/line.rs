//! The requests that wait in a replay's router for the worker where they cost the least: the router's own queue, without classes,
//! tenants and bounds. Pure.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::fleet;
use crate::fleet::load::LoadShare;
use crate::ids::ClientKey;
use crate::queue::{
    LOOKED_AT_IN_ORDER, Look, Outcome, PASSED_OVER_FOR, Queue, Request, Room, STANDS_BEHIND_MAX,
    Settings, Stretch,
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
    /// By worker: what waits for it, and when.
    promised: Vec<LoadShare>,
    due: Vec<BTreeSet<(Instant, usize)>>,
    /// By worker: the first one in another replica's line that is let go first, and since when.
    let_first: Vec<Option<(Instant, Duration)>>,
}

#[derive(Clone, Copy, Debug)]
struct WaitingJob {
    worker: usize,
    load: LoadShare,
    due: Instant,
    /// When it was last looked at.
    at: Duration,
    /// Its worker had room when it arrived: it lets no request of another replica go first.
    had_room: bool,
    /// Since when it lets one of another replica go first, or has once done so.
    lets_first_since: Option<Duration>,
}

impl WorkerLines {
    /// Puts a request into the line where it waits now.
    fn set(&mut self, request: usize, job: WaitingJob) {
        self.remove(request);
        self.promised[job.worker] = self.promised[job.worker].plus(job.load);
        self.due[job.worker].insert((job.due, request));
        self.waiting.insert(request, job);
    }

    fn remove(&mut self, request: usize) {
        if let Some(job) = self.waiting.remove(&request) {
            self.promised[job.worker] = self.promised[job.worker].minus(job.load);
            self.due[job.worker].remove(&(job.due, request));
        }
    }

    fn first(&self, worker: usize) -> Option<Instant> {
        self.due[worker].first().map(|(due, _)| *due)
    }

    /// Whether a request whose worker has room waits on, so that another replica sends its first one there, which is
    /// due at `peers_first`.
    fn lets_another_first(
        &mut self,
        now: Duration,
        job: &mut WaitingJob,
        peers_first: Option<Instant>,
    ) -> bool {
        let own_first = self.first(job.worker).unwrap_or(job.due).min(job.due);
        let is_before = |first: &Instant| *first < own_first;
        let Some(first) = peers_first.filter(is_before).filter(|_| !job.had_room) else {
            return false;
        };
        let own_since = *job.lets_first_since.get_or_insert(now);
        let (_, since) = *self.let_first[job.worker].get_or_insert((first, now));
        now - since.min(own_since) < STANDS_BEHIND_MAX
    }

    /// Forgets those let go first that are not first any more.
    fn keep_let_first(&mut self, peers_first: &[Option<Instant>]) {
        for (let_first, first) in self.let_first.iter_mut().zip(peers_first) {
            *let_first = let_first.filter(|(known, _)| *first == Some(*known));
        }
    }
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
    /// When the first of those is due.
    pub(super) peers_first: Vec<Option<Instant>>,
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
            counted_workers: 0,
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
                due: vec![BTreeSet::new(); workers],
                let_first: vec![None; workers],
            },
            epoch,
        }
    }

    /// What waits for each worker.
    pub(super) fn promised(&self) -> &[LoadShare] {
        &self.lines.promised
    }

    /// When the first one in each worker's line is due.
    pub(super) fn first(&self) -> Vec<Option<Instant>> {
        let workers = 0..self.lines.due.len();
        workers.map(|worker| self.lines.first(worker)).collect()
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
            ttft_target: None,
            is_background: false,
            deadline: arrived + NEVER,
            has_room: false,
            has_lost_target: false,
        };
        let has_room = workers.has_room(worker, self.max_worker_queued_tokens);
        let job = WaitingJob {
            worker,
            load,
            due: self.queue.due(&waiting).at,
            at: now,
            had_room: has_room && self.lines.first(worker).is_none(),
            lets_first_since: None,
        };
        self.lines.set(request, job);
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
        lines.keep_let_first(&workers.peers_first);
        let mut is_waited_for = vec![false; workers.loads.len()];
        let mut in_order = LOOKED_AT_IN_ORDER;
        let mut sent = Vec::new();
        let room = workers.room(max);
        let look = |request: &usize, _, stretch: Stretch| {
            let is_open = |worker: usize| !is_waited_for[worker] && workers.has_room(worker, max);
            if stretch != Stretch::First || !(0..workers.loads.len()).any(is_open) {
                return Look::Full;
            }
            let before = lines.waiting[request];
            let is_new = now - before.at < PASSED_OVER_FOR;
            if in_order == 0 && is_new && !is_open(before.worker) {
                workers.loads[before.worker] = workers.loads[before.worker].plus(before.load);
                is_waited_for[before.worker] = true;
                return Look::PassOver;
            }
            in_order = in_order.saturating_sub(1);
            let behind = workers.loads.iter().zip(&workers.promised);
            let behind: Vec<LoadShare> = behind.map(|(load, peers)| load.plus(*peers)).collect();
            let (worker, prompt_tokens, uncached_tokens) = choose(*request, &behind);
            let mut job = WaitingJob {
                worker,
                load: LoadShare::of_request(prompt_tokens, uncached_tokens),
                at: now,
                ..before
            };
            let peers_first = workers.peers_first[worker];
            let has_room = is_open(worker);
            let is_sent = has_room && !lines.lets_another_first(now, &mut job, peers_first);
            workers.loads[worker] = workers.loads[worker].plus(job.load);
            if !is_sent {
                lines.set(*request, job);
                // One that lets another go first waits beside the line.
                is_waited_for[worker] |= !has_room;
                return Look::Wait;
            }
            lines.remove(*request);
            sent.push(Sent {
                request: *request,
                worker,
                uncached_tokens,
            });
            Look::Send
        };
        let left = queue.advance(*epoch + now, room, 0, look);
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
            peers_first: vec![None, peers_first],
            slots: vec![None; 2],
            mean_prompt_token: 0.001,
        }
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
}
