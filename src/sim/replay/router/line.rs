//! The requests that wait in a replay's router for the worker where they cost the least: the router's own queue, without classes,
//! tenants and bounds. Pure.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Load, Router};
use crate::fleet;
use crate::ids::ClientKey;
use crate::queue::{Look, Outcome, Queue, Request, Room, Settings};
use crate::sim::replay::engine::EngineGauges;
use crate::sim::replay::reported::ReportedIndex;
use crate::sim::replay::workload::Job;

/// Longer than any replay.
const NEVER: Duration = Duration::from_secs(365 * 86_400);

#[derive(Debug)]
pub(super) struct Line {
    queue: Queue<usize>,
    epoch: Instant,
}

/// A request that is sent.
#[derive(Clone, Copy, Debug)]
pub(in crate::sim::replay) struct Sent {
    pub(in crate::sim::replay) request: usize,
    pub(in crate::sim::replay) worker: usize,
    pub(in crate::sim::replay) uncached_tokens: u32,
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
            queue: Queue::new(Arc::new(settings)),
            epoch,
        }
    }
}

impl Router {
    /// Whether a request that has arrived waits here until [`Self::release`] sends it. `tokens`: to compute where it costs the least
    /// now.
    pub(in crate::sim::replay) fn waits(
        &mut self,
        now: Duration,
        request: usize,
        tokens: u32,
    ) -> bool {
        let seconds = f64::from(tokens) * self.speeds.mean_prompt_token();
        let loads: Vec<Load> = self.loads().collect();
        let room = self.room(&loads);
        let Some(line) = &mut self.line else {
            return false;
        };
        let arrived = line.epoch + now;
        let waiting = Request {
            priority: 0,
            client: ClientKey(0),
            tokens: tokens.into(),
            compute: Duration::from_secs_f64(seconds),
            bytes: 0,
            received: arrived,
            entered: arrived,
            ttft_target: None,
            is_background: false,
            deadline: arrived + NEVER,
        };
        let entered = line.queue.enter(arrived, room, waiting, request);
        entered.expect("nothing bounds it");
        true
    }

    /// Those whose workers have room, in their order: each is promised to the worker where it costs the least behind those that
    /// were promised before.
    pub(in crate::sim::replay) fn release(
        &mut self,
        now: Duration,
        jobs: &[Job],
        reported: &ReportedIndex,
        gauges: &[EngineGauges],
    ) -> Vec<Sent> {
        let is_empty = |line: &Line| line.queue.is_empty();
        if self.line.as_ref().is_none_or(is_empty) {
            return Vec::new();
        }
        let Some(mut line) = self.line.take() else {
            return Vec::new();
        };
        let mut loads: Vec<Load> = self.loads().collect();
        let mut is_waited_for = vec![false; loads.len()];
        let mut sent = Vec::new();
        let room = self.room(&loads);
        let left = line.queue.advance(line.epoch + now, room, 0, |request, _| {
            let mut all = 0..loads.len();
            if !all.any(|worker| !is_waited_for[worker] && self.has_room(worker, &loads[worker])) {
                return Look::Full;
            }
            let job = &jobs[*request];
            let chosen = self.choose_by(now, job, reported, gauges, &loads);
            let (worker, uncached_tokens) = chosen.expect("every modelled engine is usable");
            let is_sent = !is_waited_for[worker] && self.has_room(worker, &loads[worker]);
            loads[worker].add(job.input_tokens, uncached_tokens);
            if !is_sent {
                is_waited_for[worker] = true;
                return Look::Wait;
            }
            sent.push(Sent {
                request: *request,
                worker,
                uncached_tokens,
            });
            Look::Send
        });
        debug_assert!(left.iter().all(|left| left.outcome == Outcome::Released));
        self.line = Some(line);
        sent
    }

    /// Whether a worker with such a load has room for one more request.
    fn has_room(&self, worker: usize, load: &Load) -> bool {
        let slots = self.engines[worker].learnt_slots();
        let is_free = |slots: u32| fleet::load::free_slots(slots, load.requests) > 0;
        load.queued_tokens < self.queue.max_worker_queued_tokens && slots.is_none_or(is_free)
    }

    fn room(&self, loads: &[Load]) -> Room {
        let mut all = 0..loads.len();
        Room {
            workers: loads.len() as u32,
            is_full: !all.any(|worker| self.has_room(worker, &loads[worker])),
            queued_tokens: loads.iter().map(|load| load.queued_tokens).sum(),
            rate: (1.0 / self.speeds.mean_prompt_token()) as u64,
        }
    }
}
