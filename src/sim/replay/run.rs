//! One replay in virtual time: requests arrive, routers choose workers, engines compute prompts, and KV events and load
//! reports arrive with their delays.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use super::engine::{CacheChange, Computed, EngineModel};
use super::reported::ReportedIndex;
use super::router::{self, RequestEvent, Router};
use super::workload::{self, Job};
use crate::sim::world::World;

/// How often the routers learn the workers' speeds and expire entries of their indexes, as in production.
const TICK: Duration = Duration::from_secs(1);

/// The engines, the routers and the delays between them.
#[derive(Clone, Debug)]
pub(super) struct Fleet {
    pub(super) workers: usize,
    pub(super) cache_blocks: usize,
    pub(super) block_tokens: NonZeroU32,
    /// By worker.
    pub(super) prefill_tokens_per_second: Vec<f64>,
    /// By worker: for a token of an answer.
    pub(super) decode: Vec<Duration>,
    pub(super) event_lag: Duration,
    pub(super) routers: usize,
    /// Time between two reports of a replica to the others; `None` if there are none.
    pub(super) sync_interval: Option<Duration>,
}

/// Measurements of a replay.
#[derive(Clone, Debug)]
pub(super) struct Outcome {
    /// By request.
    pub(super) times_to_first_token: Vec<Duration>,
    /// From the arrivals to the ends of the answers, in all.
    pub(super) total_time: Duration,
    pub(super) cached_tokens: u64,
    pub(super) requests_per_worker: Vec<u64>,
    /// Prompt tokens that each worker computed, without cached ones.
    pub(super) computed_per_worker: Vec<u64>,
    /// The end of the last answer.
    pub(super) elapsed: Duration,
}

#[derive(Debug)]
enum Event {
    Arrives(usize),
    Computed {
        worker: usize,
    },
    Ends {
        worker: usize,
        request: usize,
    },
    /// An engine's KV events reach the routers.
    KvEvents {
        worker: usize,
        request: usize,
        change: CacheChange,
    },
    /// A router reports what changed to the other replicas.
    Report {
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
    exact_index: ReportedIndex,
    outcome: Outcome,
    unfinished: usize,
}

/// Replays the jobs. Calls `show` after each computed prompt with the number of prompts computed so far.
pub(super) fn run(
    jobs: &[Job],
    fleet: Fleet,
    settings: &router::Settings,
    born: Instant,
    mut show: impl FnMut(usize),
) -> Outcome {
    let rates = fleet.prefill_tokens_per_second.iter();
    let engine = |rate: &f64| EngineModel::new(fleet.cache_blocks, *rate);
    let engines = rates.map(engine).collect();
    let (workers, routers) = (fleet.workers, fleet.routers);
    let mut run = Run {
        jobs,
        events: World::default(),
        engines,
        routers: (0..routers).map(|_| Router::new(settings, born)).collect(),
        is_report_due: vec![false; routers],
        reported_at: vec![None; routers],
        exact_index: ReportedIndex::new(workers, fleet.block_tokens, workload::root()),
        outcome: Outcome {
            times_to_first_token: vec![Duration::ZERO; jobs.len()],
            total_time: Duration::ZERO,
            cached_tokens: 0,
            requests_per_worker: vec![0; workers],
            computed_per_worker: vec![0; workers],
            elapsed: Duration::ZERO,
        },
        unfinished: jobs.len(),
        fleet,
    };
    for (request, job) in jobs.iter().enumerate() {
        run.events.set(job.at, Event::Arrives(request));
    }
    run.events.set(TICK, Event::Tick);
    let mut computed = 0;
    while let Some(event) = run.events.next_event() {
        if matches!(event, Event::Computed { .. }) {
            computed += 1;
            show(computed);
        }
        run.on_event(event);
    }
    run.outcome
}

impl Run<'_> {
    fn on_event(&mut self, event: Event) {
        let now = self.events.now();
        match event {
            Event::Arrives(request) => self.on_arrival(now, request),
            Event::Computed { worker } => {
                if let Some((computed, next)) = self.engines[worker].finish(self.jobs) {
                    self.compute(now, worker, next);
                    self.on_computed(now, worker, computed);
                }
            }
            Event::Ends { worker, request } => {
                self.report(now, request, RequestEvent::Ended);
                self.outcome.total_time += now - self.jobs[request].at;
                self.outcome.requests_per_worker[worker] += 1;
                self.outcome.elapsed = now;
                self.unfinished -= 1;
            }
            Event::KvEvents {
                worker,
                request,
                change,
            } => self.exact_index.apply(worker, &self.jobs[request], &change),
            Event::Report { router } => {
                self.is_report_due[router] = false;
                self.reported_at[router] = Some(now);
                let report = self.routers[router].report();
                for (other, replica) in self.routers.iter_mut().enumerate() {
                    if other != router {
                        replica.on_report(now, self.jobs, &report);
                    }
                }
            }
            Event::Tick if self.unfinished > 0 => {
                for router in &mut self.routers {
                    router.on_second(now);
                }
                self.events.set(now + TICK, Event::Tick);
            }
            Event::Tick => {}
        }
    }

    fn on_arrival(&mut self, now: Duration, request: usize) {
        let job = &self.jobs[request];
        let chosen = self.routers[job.router].choose(now, job, &self.exact_index);
        let (worker, uncached_tokens) = chosen.expect("every modelled engine is usable");
        self.report(
            now,
            request,
            RequestEvent::Chosen {
                worker,
                uncached_tokens,
            },
        );
        let next = self.engines[worker].submit(self.jobs, request);
        self.compute(now, worker, next);
    }

    fn on_computed(&mut self, now: Duration, worker: usize, computed: Computed) {
        let Computed {
            request,
            cached_tokens,
            change,
        } = computed;
        let job = &self.jobs[request];
        self.outcome.times_to_first_token[request] = now - job.at;
        self.outcome.cached_tokens += u64::from(cached_tokens);
        self.outcome.computed_per_worker[worker] += u64::from(job.input_tokens - cached_tokens);
        self.report(now, request, RequestEvent::FirstToken);
        let decode = self.fleet.decode[worker] * job.output_tokens.saturating_sub(1);
        self.events
            .set(now + decode, Event::Ends { worker, request });
        let kv_events = Event::KvEvents {
            worker,
            request,
            change,
        };
        self.events.set(now + self.fleet.event_lag, kv_events);
    }

    fn compute(&mut self, now: Duration, worker: usize, next: Option<Duration>) {
        if let Some(time) = next {
            self.events.set(now + time, Event::Computed { worker });
        }
    }

    /// Counts a request's progress at its own router, whose next report then says so.
    fn report(&mut self, now: Duration, request: usize, event: RequestEvent) {
        let job = &self.jobs[request];
        self.routers[job.router].apply(now, request, job, event);
        if let Some(interval) = self.fleet.sync_interval
            && self.routers.len() > 1
            && !std::mem::replace(&mut self.is_report_due[job.router], true)
        {
            let router = job.router;
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
    if interval.is_zero() {
        return now;
    }
    let phase = interval.mul_f64(router as f64 / routers as f64);
    let since = now.saturating_sub(phase).as_nanos() / interval.as_nanos();
    phase + interval * (since as u32 + 1)
}

#[cfg(test)]
mod tests;
