//! The requests that wait in a replay's router for the worker where they cost the least: the router's own queue, without classes,
//! tenants and bounds. Pure.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::fleet;
use crate::fleet::load::LoadShare;
use crate::ids::ClientKey;
use crate::queue::{Look, Outcome, Queue, Request, Room, Settings};

/// Longer than any replay.
const NEVER: Duration = Duration::from_secs(365 * 86_400);

#[derive(Debug)]
pub(super) struct Line {
    queue: Queue<usize>,
    /// What waits for each worker.
    pub(super) promised: Vec<LoadShare>,
    max_worker_queued_tokens: u64,
    epoch: Instant,
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
    pub(super) fn new(settings: &Settings, epoch: Instant) -> Self {
        let settings = Settings {
            max_wait: NEVER,
            max_requests: u32::MAX,
            max_size: u64::MAX,
            ..settings.clone()
        };
        Self {
            max_worker_queued_tokens: settings.max_worker_queued_tokens,
            queue: Queue::new(Arc::new(settings)),
            promised: Vec::new(),
            epoch,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// `tokens`: to compute where the request costs the least now.
    pub(super) fn enter(&mut self, now: Duration, request: usize, tokens: u32, workers: &Workers) {
        let arrived = self.epoch + now;
        let waiting = Request {
            priority: 0,
            client: ClientKey(0),
            tokens: tokens.into(),
            compute: Duration::from_secs_f64(f64::from(tokens) * workers.mean_prompt_token),
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
        let room = workers.room(self.max_worker_queued_tokens);
        let entered = self.queue.enter(arrived, room, waiting, request);
        entered.expect("nothing bounds it");
    }

    /// The requests whose workers have room, in their order: each is promised to the worker where it costs the least behind
    /// those that were promised before. `choose` says which one that is at such loads, with the tokens of the prompt and
    /// those to compute.
    pub(super) fn release(
        &mut self,
        now: Duration,
        mut workers: Workers,
        mut choose: impl FnMut(usize, &[LoadShare]) -> (usize, u32, u32),
    ) -> Vec<Sent> {
        let max = self.max_worker_queued_tokens;
        let mut is_waited_for = vec![false; workers.loads.len()];
        let mut waiting = vec![LoadShare::default(); workers.loads.len()];
        let mut sent = Vec::new();
        let room = workers.room(max);
        let look = |request: &usize, _, _| {
            let is_open = |worker: usize| !is_waited_for[worker] && workers.has_room(worker, max);
            if !(0..workers.loads.len()).any(is_open) {
                return Look::Full;
            }
            let behind = workers.loads.iter().zip(&workers.promised);
            let behind: Vec<LoadShare> = behind.map(|(load, peers)| load.plus(*peers)).collect();
            let (worker, prompt_tokens, uncached_tokens) = choose(*request, &behind);
            let is_sent = is_open(worker);
            let one = LoadShare::of_request(prompt_tokens, uncached_tokens);
            workers.loads[worker] = workers.loads[worker].plus(one);
            if !is_sent {
                waiting[worker] = waiting[worker].plus(one);
                is_waited_for[worker] = true;
                return Look::Wait;
            }
            sent.push(Sent {
                request: *request,
                worker,
                uncached_tokens,
            });
            Look::Send
        };
        let left = self.queue.advance(self.epoch + now, room, 0, look);
        debug_assert!(left.iter().all(|left| left.outcome == Outcome::Released));
        self.promised = waiting;
        sent
    }
}
