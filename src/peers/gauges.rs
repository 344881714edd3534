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
use crate::fleet::waiting::DueTime;

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
    /// When the first of one replica's requests that wait for room there is due; of a sum none.
    pub first: Option<DueTime>,
}

impl WorkerLoad {
    /// What this replica has at a worker, and what waits in it for that one, with the first of these.
    pub(super) fn of_worker(load: &Load, waiting: LoadShare, first: Option<DueTime>) -> Self {
        Self {
            uncomputed_prompts: load.own_uncomputed_prompts(),
            ..Self::new(load.own(), waiting, first)
        }
    }

    pub(super) fn new(sent: LoadShare, waiting: LoadShare, first: Option<DueTime>) -> Self {
        Self {
            requests: sent.requests.into(),
            queued_tokens: sent.queued_tokens,
            context_tokens: sent.context_tokens,
            waiting,
            uncomputed_prompts: 0,
            first,
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

/// Whether this replica takes requests and has workers for them, as is reported to the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Condition {
    pub is_ready: bool,
    pub is_draining: bool,
}

/// A whole report is sent this often, whatever was sent between.
const WHOLE_INTERVAL: Duration = Duration::from_secs(1);

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
            .map(|(number, (new, _))| wire_load(now, number, new))
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

    /// Names and the whole state as last reported, for a replica that has just connected or missed a report. What is
    /// due counts from the last report on, so it seems to be due later, by a heartbeat's interval at most.
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
        busy.map(|(number, load)| wire_load(self.reported_at, number, load))
            .collect()
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

/// A load as it is reported at `now`.
fn wire_load(now: Instant, number: u32, load: &WorkerLoad) -> wire::WorkerLoad {
    wire::WorkerLoad {
        number,
        requests: load.sent().requests,
        queued_tokens: load.queued_tokens,
        context_tokens: load.context_tokens,
        waiting_requests: load.waiting.requests,
        waiting_queued_tokens: load.waiting.queued_tokens,
        waiting_context_tokens: load.waiting.context_tokens,
        uncomputed_prompts: load.uncomputed_prompts,
        first_due_ms: load.first.map(|first| ms_until(now, first.at)),
        first_priority: load.first.map_or(0, |first| first.priority),
    }
}

/// Rounded up: no request seems to be due earlier at another replica than it is, or both would wait for each other.
fn ms_until(now: Instant, at: Instant) -> i32 {
    let ms = |ms: u128| i32::try_from(ms).unwrap_or(i32::MAX);
    let left = at.saturating_duration_since(now).as_nanos();
    let over = now.saturating_duration_since(at).as_millis();
    ms(left.div_ceil(1_000_000)) - ms(over)
}

/// The time that another replica means by so many milliseconds from its report on, which has come now.
pub(super) fn after_ms(now: Instant, ms: i32) -> Instant {
    let by = Duration::from_millis(ms.unsigned_abs().into());
    let at = if ms < 0 {
        now.checked_sub(by)
    } else {
        now.checked_add(by)
    };
    at.unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;

    #[test]
    fn what_is_due_is_said_from_the_report_on_and_never_too_early() {
        let now = observe::now();
        let us = Duration::from_micros;
        for (at, ms) in [
            (now, 0),
            (now + us(1), 1),
            (now + us(2_000), 2),
            (now + us(2_001), 3),
            (now - us(1), 0),
            (now - us(2_999), -2),
            (now + us(5_000_000_000_000), i32::MAX),
        ] {
            assert_eq!(ms_until(now, at), ms);
        }
        for ms in [-3, 0, 3] {
            assert_eq!(ms_until(now, after_ms(now, ms)), ms);
        }
        // None is too far away.
        assert!(after_ms(now, i32::MIN) <= now && after_ms(now, i32::MAX) >= now);
    }

    #[test]
    fn what_waits_makes_no_report_by_itself_as_time_passes() {
        let start = observe::now();
        let ms = Duration::from_millis;
        let mut gauges = Gauges::new(start, ms(250));
        let key = WorkerKey::worker(&"a:1".into());
        let mut reports = |at: u64, due: u64| {
            let waiting = LoadShare {
                requests: 1,
                ..LoadShare::default()
            };
            let first = DueTime {
                priority: 0,
                at: start + ms(due),
            };
            let load = WorkerLoad::new(LoadShare::default(), waiting, Some(first));
            let loads = std::iter::once((key.clone(), load));
            let condition = Condition::default();
            gauges.report(start + ms(at), condition, loads).len()
        };
        // With the worker's name.
        assert_eq!(reports(0, 60), 2);
        assert_eq!((reports(20, 60), reports(200, 60)), (0, 0));
        assert_eq!((reports(220, 80), reports(240, 80)), (1, 0));
        // A heartbeat.
        assert_eq!(reports(470, 80), 1);
    }
}
