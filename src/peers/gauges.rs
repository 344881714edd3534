//! What this replica itself has at each worker, as reports to the other replicas: the whole state, or what changed since
//! the last report. Pure. Each report is encoded once for all of them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::frame::framed;
use super::numbers::{Numbers, WorkerKey};
use super::wire;
use super::wire::peer_message::Kind;
use crate::fleet::load::{Load, LoadShare};

/// Load at one worker, or one of its ranks: this replica's, another one's, or a sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerLoad {
    pub requests: u64,
    /// Uncached prompt tokens of requests without a first token yet.
    pub queued_tokens: u64,
    /// Prompt tokens of all requests.
    pub context_tokens: u64,
    /// Requests that wait in a router, and would be sent there now.
    pub waiting: LoadShare,
    /// Prompts that are not computed yet, in millionths; of a rank not counted.
    pub uncomputed_prompts: u64,
}

impl WorkerLoad {
    /// What this replica has at a worker, and what waits in it for that one.
    pub(super) fn of_worker(load: &Load, waiting: LoadShare) -> Self {
        Self {
            uncomputed_prompts: load.own_uncomputed_prompts(),
            ..Self::new(load.own(), waiting)
        }
    }

    pub(super) fn new(sent: LoadShare, waiting: LoadShare) -> Self {
        Self {
            requests: sent.requests.into(),
            queued_tokens: sent.queued_tokens,
            context_tokens: sent.context_tokens,
            waiting,
            uncomputed_prompts: 0,
        }
    }

    /// Without what waits.
    pub(super) fn sent(&self) -> LoadShare {
        LoadShare {
            requests: u32::try_from(self.requests).unwrap_or(u32::MAX),
            queued_tokens: self.queued_tokens,
            context_tokens: self.context_tokens,
        }
    }

    pub fn is_zero(&self) -> bool {
        *self == Self::default()
    }
}

/// Whether this replica takes requests, as is reported to the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Condition {
    pub is_ready: bool,
    pub is_draining: bool,
}

/// A whole report is sent this often, whatever was sent between.
const WHOLE_INTERVAL: Duration = Duration::from_secs(1);

/// What was reported last, and what to report next.
#[derive(Debug)]
pub struct Gauges {
    pub numbers: Numbers,
    heartbeat_interval: Duration,
    /// By number.
    reported: Vec<WorkerLoad>,
    condition: Condition,
    sequence: u64,
    observed_at: Instant,
    reported_at: Instant,
    whole_at: Instant,
    /// Names and the whole state, encoded since the last change.
    whole: Option<[Bytes; 2]>,
}

impl Gauges {
    pub fn new(now: Instant, heartbeat_interval: Duration) -> Self {
        Self {
            numbers: Numbers::default(),
            heartbeat_interval,
            reported: Vec::new(),
            condition: Condition::default(),
            sequence: 0,
            observed_at: now,
            reported_at: now,
            whole_at: now,
            whole: None,
        }
    }

    /// Compares what this replica has at each worker with what was reported, and makes a report if anything changed or
    /// a heartbeat is due: the messages for each replica that has got everything before. Workers and ranks that are not in
    /// `loads` have none.
    pub fn report(
        &mut self,
        now: Instant,
        condition: Condition,
        loads: impl Iterator<Item = (WorkerKey, WorkerLoad)>,
    ) -> Vec<Bytes> {
        let mut current = vec![WorkerLoad::default(); self.numbers.len()];
        for (key, load) in loads {
            let number = self.numbers.number(now, &key) as usize;
            if number >= current.len() {
                current.resize(number + 1, WorkerLoad::default());
            }
            current[number] = load;
        }
        self.reported.resize(current.len(), WorkerLoad::default());
        let changes = current.iter().zip(&self.reported);
        let changes = (0..).zip(changes).filter(|(_, (new, old))| new != old);
        let changed: Vec<_> = changes
            .map(|(number, (new, _))| wire_load(number, new))
            .collect();
        let names = self.numbers.take_unannounced();
        let is_changed = !changed.is_empty() || condition != self.condition || names.is_some();
        let is_heartbeat_due =
            now.saturating_duration_since(self.reported_at) >= self.heartbeat_interval;
        // Changes happened after the last look.
        let age = now.saturating_duration_since(self.observed_at);
        self.observed_at = now;
        if !is_changed && !is_heartbeat_due {
            return Vec::new();
        }
        self.whole = None;
        self.reported = current;
        self.condition = condition;
        self.reported_at = now;
        self.sequence += 1;
        let is_whole = now.saturating_duration_since(self.whole_at) >= WHOLE_INTERVAL;
        if is_whole {
            self.whole_at = now;
        }
        let workers = if is_whole {
            self.busy_workers()
        } else {
            changed
        };
        let load = self.encode(is_whole, workers, age);
        let names = names.map(|names| framed(Kind::Workers(names)));
        names.into_iter().chain([load]).collect()
    }

    /// Names and the whole state as last reported, for a replica that has just connected or missed a report.
    pub fn whole(&mut self) -> [Bytes; 2] {
        if let Some(whole) = &self.whole {
            return whole.clone();
        }
        let names = framed(Kind::Workers(self.numbers.all()));
        let load = self.encode(true, self.busy_workers(), Duration::ZERO);
        let whole = [names, load];
        self.whole = Some(whole.clone());
        whole
    }

    /// Gives up the numbers of workers that left the fleet. What was reported of them is reported as nothing first.
    pub fn forget(&mut self, now: Instant, is_listed: impl Fn(&str) -> bool) {
        let Self {
            numbers, reported, ..
        } = self;
        let is_busy = |number: u32| {
            let load = reported.get(number as usize);
            load.is_some_and(|load| !load.is_zero())
        };
        let busy: Vec<Arc<str>> = (0..numbers.len() as u32)
            .filter(|number| is_busy(*number))
            .filter_map(|number| Some(numbers.key(number)?.address.clone()))
            .collect();
        numbers.forget(now, |address| {
            is_listed(address) || busy.iter().any(|busy| **busy == *address)
        });
        self.whole = None;
    }

    fn busy_workers(&self) -> Vec<wire::WorkerLoad> {
        let loads = (0..).zip(&self.reported);
        let busy = loads.filter(|(_, load)| !load.is_zero());
        busy.map(|(number, load)| wire_load(number, load)).collect()
    }

    fn encode(&self, is_whole: bool, workers: Vec<wire::WorkerLoad>, age: Duration) -> Bytes {
        framed(Kind::Load(wire::LoadReport {
            sequence: self.sequence,
            is_whole,
            workers,
            age_us: u32::try_from(age.as_micros()).unwrap_or(u32::MAX),
            is_ready: self.condition.is_ready,
            is_draining: self.condition.is_draining,
        }))
    }
}

fn wire_load(number: u32, load: &WorkerLoad) -> wire::WorkerLoad {
    wire::WorkerLoad {
        number,
        requests: load.sent().requests,
        queued_tokens: load.queued_tokens,
        context_tokens: load.context_tokens,
        waiting_requests: load.waiting.requests,
        waiting_queued_tokens: load.waiting.queued_tokens,
        waiting_context_tokens: load.waiting.context_tokens,
        uncomputed_prompts: load.uncomputed_prompts,
    }
}
