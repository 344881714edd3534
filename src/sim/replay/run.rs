//! One replay in virtual time: requests arrive, routers choose workers, engines compute prompts, and KV events and load
//! reports arrive with their delays.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use super::engine::{EngineGauges, EngineModel, EngineSettings, StoredBlocks};
use super::reported::ReportedIndex;
use super::router::{self, RequestEvent, Router, Sent};
use super::workload::{self, Arrival, Job};
use crate::ids::BlockHash;
use crate::peers::pace::Wakes;
use crate::sim::world::World;

/// How often the routers learn the workers' speeds and expire entries of their indexes, as in production, and look at
/// those who wait even if nothing has happened.
const TICK: Duration = Duration::from_secs(1);

/// How often each of several routers looks at those who wait there, as in production. How long these let requests of
/// other routers go first is a matter of time. With one router only events change who has room.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// The engines, the routers and the delays between them.
#[derive(Clone, Debug)]
pub(super) struct Fleet {
    /// By worker.
    pub(super) engines: Vec<EngineSettings>,
    pub(super) block_tokens: NonZeroU32,
    pub(super) event_lag: Duration,
    pub(super) routers: usize,
    /// Time between two reports of a replica to the others; `None` if there are none.
    pub(super) sync_interval: Option<Duration>,
}

/// Measurements of a replay.
#[derive(Clone, Debug)]
pub(super) struct Outcome {
    /// By request.
    pub(super) answers: Vec<AnswerTime>,
    pub(super) cached_tokens: u64,
    pub(super) requests_per_worker: Vec<u64>,
    /// Prompt tokens that each worker computed, without cached ones.
    pub(super) computed_per_worker: Vec<u64>,
    pub(super) busy_per_worker: Vec<Duration>,
    pub(super) preemptions: u64,
    /// The end of the last answer.
    pub(super) elapsed: Duration,
}

/// When a request arrived, and how long its answer took from then on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct AnswerTime {
    pub(super) arrived: Duration,
    pub(super) first_token: Duration,
    pub(super) whole: Duration,
}

#[derive(Debug)]
enum Event {
    Arrives(usize),
    /// An engine's steps end, unless another request has changed that meanwhile.
    StepEnds {
        worker: usize,
    },
    /// An engine's KV events reach the routers.
    KvEvents {
        worker: usize,
        stored: Vec<StoredBlocks>,
        evicted: Vec<BlockHash>,
    },
    /// A router reports what changed to the other replicas.
    Report {
        router: usize,
    },
    /// A router looks at those who wait there.
    Look {
        router: usize,
    },
    Tick,
}

struct Run<'a> {
    jobs: &'a [Job],
    fleet: Fleet,
    events: World<Event>,
    engines: Vec<EngineModel>,
    routers: Vec<Router>,
    /// By router: its next report is scheduled.
    is_report_due: Vec<bool>,
    /// By router: the time of its last report.
    reported_at: Vec<Option<Duration>>,
    /// By router: when reports of others woke it.
    wakes: Vec<Wakes>,
    /// By router: its next look is scheduled.
    is_look_due: Vec<bool>,
    born: Instant,
    exact_index: ReportedIndex,
    /// Requests that arrive when one ends.
    next_to_arrive: VecDeque<usize>,
    outcome: Outcome,
    first_tokens: usize,
    unfinished: usize,
}

/// Replays the jobs. Calls `show` after each first token with the number of first tokens so far.
pub(super) fn run(
    jobs: &[Job],
    fleet: Fleet,
    settings: &router::Settings,
    born: Instant,
    mut show: impl FnMut(usize),
) -> Outcome {
    let mut run = Run::new(jobs, fleet, settings, born);
    for (request, job) in jobs.iter().enumerate() {
        match job.arrival {
            Arrival::Timed => run.events.set(job.at, Event::Arrives(request)),
            Arrival::WhenOneEnds => run.next_to_arrive.push_back(request),
            Arrival::AfterPrevious => {}
        }
    }
    run.events.set(TICK, Event::Tick);
    let mut shown = 0;
    while let Some(event) = run.events.next_event() {
        run.on_event(event);
        if run.first_tokens > shown {
            shown = run.first_tokens;
            show(shown);
        }
    }
    let engines = run.engines.iter();
    run.outcome.preemptions = engines.clone().map(EngineModel::preemptions).sum();
    run.outcome.busy_per_worker = engines.map(EngineModel::busy_time).collect();
    run.outcome
}

impl<'a> Run<'a> {
    fn new(jobs: &'a [Job], fleet: Fleet, settings: &router::Settings, born: Instant) -> Self {
        let (workers, routers) = (fleet.engines.len(), fleet.routers);
        let engines = fleet.engines.iter().copied();
        Self {
            jobs,
            events: World::default(),
            engines: engines.map(EngineModel::new).collect(),
            routers: (0..routers).map(|_| Router::new(settings, born)).collect(),
            is_report_due: vec![false; routers],
            reported_at: vec![None; routers],
            wakes: (0..routers).map(|_| Wakes::default()).collect(),
            is_look_due: vec![false; routers],
            born,
            exact_index: ReportedIndex::new(workers, fleet.block_tokens, workload::root()),
            next_to_arrive: VecDeque::new(),
            outcome: Outcome {
                answers: vec![AnswerTime::default(); jobs.len()],
                cached_tokens: 0,
                requests_per_worker: vec![0; workers],
                computed_per_worker: vec![0; workers],
                busy_per_worker: Vec::new(),
                preemptions: 0,
                elapsed: Duration::ZERO,
            },
            first_tokens: 0,
            unfinished: jobs.len(),
            fleet,
        }
    }
}

impl Run<'_> {
    fn on_event(&mut self, event: Event) {
        let now = self.events.now();
        match event {
            Event::Arrives(request) => self.on_arrival(now, request),
            Event::StepEnds { worker } => self.on_step_end(now, worker),
            Event::KvEvents {
                worker,
                stored,
                evicted,
            } => {
                for stored in &stored {
                    let job = &self.jobs[stored.request];
                    self.exact_index.store(worker, job, stored);
                }
                self.exact_index.remove(worker, &evicted);
            }
            Event::Report { router } => {
                self.on_report(now, router);
                self.release_woken(now, router);
            }
            Event::Look { router } => {
                self.is_look_due[router] = false;
                self.release(now, router);
            }
            Event::Tick if self.unfinished > 0 => {
                let gauges = self.gauges();
                for router in &mut self.routers {
                    router.on_second(now, &gauges);
                }
                self.release_all(now);
                self.events.set(now + TICK, Event::Tick);
            }
            Event::Tick => {}
        }
    }

    fn on_report(&mut self, now: Duration, router: usize) {
        self.is_report_due[router] = false;
        self.reported_at[router] = Some(now);
        let report = self.routers[router].report();
        for (other, replica) in self.routers.iter_mut().enumerate() {
            if other != router {
                replica.on_report(now, router, self.jobs, &report);
            }
        }
    }

    fn on_arrival(&mut self, now: Duration, request: usize) {
        let job = &self.jobs[request];
        self.outcome.answers[request].arrived = now;
        let gauges = self.gauges();
        let router = &mut self.routers[job.router];
        let chosen = router.choose(now, job, &self.exact_index, &gauges);
        let (worker, uncached_tokens) = chosen.expect("every modelled engine is usable");
        if router.waits(now, request, job, (worker, uncached_tokens)) {
            self.release(now, job.router);
            return;
        }
        let sent = Sent {
            request,
            worker,
            uncached_tokens,
        };
        self.send(now, sent);
    }

    fn gauges(&self) -> Vec<EngineGauges> {
        self.engines.iter().map(EngineModel::gauges).collect()
    }

    /// Sends what waited at a router and whose worker has room now.
    fn release(&mut self, now: Duration, router: usize) {
        if !self.routers[router].has_waiting() {
            return;
        }
        let gauges = self.gauges();
        let sent = self.routers[router].release(now, self.jobs, &self.exact_index, &gauges);
        for sent in sent {
            self.send(now, sent);
        }
        if self.routers[router].has_unreported_line() {
            self.schedule_report(now, router);
        }
        self.schedule_look(now, router);
    }

    fn schedule_look(&mut self, now: Duration, router: usize) {
        let has_waiting = self.routers.len() > 1 && self.routers[router].has_waiting();
        if has_waiting && !std::mem::replace(&mut self.is_look_due[router], true) {
            self.events.set(now + LOOK_INTERVAL, Event::Look { router });
        }
    }

    /// Releases what waits at the routers that a report of another one wakes, if not one has just before.
    fn release_woken(&mut self, now: Duration, reporter: usize) {
        for router in 0..self.routers.len() {
            let may_be_woken = router != reporter && self.routers[router].has_waiting();
            if may_be_woken && self.wakes[router].is_due(self.born + now) {
                self.release(now, router);
            }
        }
    }

    fn release_all(&mut self, now: Duration) {
        for router in 0..self.routers.len() {
            self.release(now, router);
        }
    }

    fn send(&mut self, now: Duration, sent: Sent) {
        let chosen = RequestEvent::Chosen {
            worker: sent.worker,
            uncached_tokens: sent.uncached_tokens,
        };
        self.report(now, sent.request, chosen);
        let due = self.engines[sent.worker].submit(now, self.jobs, sent.request);
        self.schedule(now, sent.worker, due);
    }

    fn on_step_end(&mut self, now: Duration, worker: usize) {
        let Some(finished) = self.engines[worker].finish(now, self.jobs) else {
            return;
        };
        self.publish(now, worker, finished.stored);
        for (request, cached_tokens) in finished.first {
            self.on_first_token(now, worker, request, cached_tokens);
        }
        for request in finished.ended {
            self.on_end(now, worker, request);
        }
        let due = self.engines[worker].start(self.jobs);
        self.schedule(now, worker, due);
        self.release_all(now);
    }

    fn on_first_token(&mut self, now: Duration, worker: usize, request: usize, cached: u32) {
        let job = &self.jobs[request];
        let answer = &mut self.outcome.answers[request];
        answer.first_token = now - answer.arrived;
        self.outcome.cached_tokens += u64::from(cached);
        self.outcome.computed_per_worker[worker] += u64::from(job.input_tokens - cached);
        self.first_tokens += 1;
        self.report(now, request, RequestEvent::FirstToken);
    }

    fn on_end(&mut self, now: Duration, worker: usize, request: usize) {
        self.report(now, request, RequestEvent::Ended);
        let answer = &mut self.outcome.answers[request];
        answer.whole = now - answer.arrived;
        self.outcome.requests_per_worker[worker] += 1;
        self.outcome.elapsed = now;
        self.unfinished -= 1;
        if let Some(request) = self.next_to_arrive.pop_front() {
            self.on_arrival(now, request);
        }
        if let Some((next, pause)) = self.jobs[request].next {
            self.events.set(now + pause, Event::Arrives(next));
        }
    }

    /// Schedules the end of an engine's steps, and the KV events of what it evicted for them.
    fn schedule(&mut self, now: Duration, worker: usize, due: Option<Duration>) {
        if let Some(at) = due {
            self.events.set(at, Event::StepEnds { worker });
        }
        self.publish(now, worker, Vec::new());
    }

    fn publish(&mut self, now: Duration, worker: usize, stored: Vec<StoredBlocks>) {
        let evicted = self.engines[worker].drain_evicted();
        if !stored.is_empty() || !evicted.is_empty() {
            let kv_events = Event::KvEvents {
                worker,
                stored,
                evicted,
            };
            self.events.set(now + self.fleet.event_lag, kv_events);
        }
    }

    /// Counts a request's progress at its own router, whose next report then says so.
    fn report(&mut self, now: Duration, request: usize, event: RequestEvent) {
        let job = &self.jobs[request];
        self.routers[job.router].apply(now, request, job, event);
        self.schedule_report(now, job.router);
    }

    fn schedule_report(&mut self, now: Duration, router: usize) {
        if let Some(interval) = self.fleet.sync_interval
            && self.routers.len() > 1
            && !std::mem::replace(&mut self.is_report_due[router], true)
        {
            if interval.is_zero() {
                // As an event it would come after what else happens at this time.
                self.on_report(now, router);
                return;
            }
            let earliest = self.reported_at[router].map_or(Duration::ZERO, |at| at + interval);
            let look = interval / LOOKS_PER_REPORT;
            let at = next_tick(
                now.max(earliest.saturating_sub(look)),
                look,
                router,
                self.routers.len(),
            );
            self.events.set(at, Event::Report { router });
        }
    }
}

/// A replica looks this often within the interval of its reports whether there is something to report.
const LOOKS_PER_REPORT: u32 = 4;

/// The time of a replica's next report. The replicas' ticks are spread over the interval.
fn next_tick(now: Duration, interval: Duration, router: usize, routers: usize) -> Duration {
    let phase = interval.mul_f64(router as f64 / routers as f64);
    let since = now.saturating_sub(phase).as_nanos() / interval.as_nanos();
    phase + interval * (since as u32 + 1)
}

#[cfg(test)]
mod tests;
