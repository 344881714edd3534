//! One replay in virtual time: requests come, routers choose, engines compute, and everybody hears of
//! it when they would.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use super::engine::{Change, Computed, Engine};
use super::router::{self, News, Router};
use super::told::Told;
use super::workload::{self, Job};
use crate::sim::world::World;

/// Between two clean-ups of the routers, which have them every second or so.
const SWEEP_EVERY: Duration = Duration::from_secs(1);

/// The fleet and what lies between it and the routers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fleet {
    pub(super) workers: usize,
    pub(super) cache_blocks: usize,
    pub(super) block_tokens: NonZeroU32,
    pub(super) prefill_tokens_per_second: f64,
    pub(super) decode: Duration,
    pub(super) event_lag: Duration,
    pub(super) routers: usize,
    /// `None`: routers never hear of each other's choices.
    pub(super) sync_lag: Option<Duration>,
}

/// What came of a replay.
#[derive(Clone, Debug)]
pub(super) struct Outcome {
    /// By request.
    pub(super) first_tokens: Vec<Duration>,
    pub(super) cached_tokens: u64,
    pub(super) requests_per_worker: Vec<u64>,
    /// Prompt tokens that each worker had to compute.
    pub(super) computed_per_worker: Vec<u64>,
    /// When the last answer ended.
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
    /// An engine's cache events reach the routers.
    Told {
        worker: usize,
        request: usize,
        change: Change,
    },
    /// A router's news reaches the others.
    Heard {
        request: usize,
        news: News,
    },
    Sweep,
}

struct Run<'a> {
    jobs: &'a [Job],
    fleet: Fleet,
    world: World<Event>,
    engines: Vec<Engine>,
    routers: Vec<Router>,
    told: Told,
    outcome: Outcome,
    unfinished: usize,
}

/// Replays the jobs, and calls `show` after each prompt with how many are computed.
pub(super) fn run(
    jobs: &[Job],
    fleet: Fleet,
    settings: &router::Settings,
    born: Instant,
    mut show: impl FnMut(usize),
) -> Outcome {
    let engine = || Engine::new(fleet.cache_blocks, fleet.prefill_tokens_per_second);
    let mut run = Run {
        jobs,
        fleet,
        world: World::new(),
        engines: (0..fleet.workers).map(|_| engine()).collect(),
        routers: (0..fleet.routers)
            .map(|_| Router::new(settings, born))
            .collect(),
        told: Told::new(fleet.workers, fleet.block_tokens, workload::root()),
        outcome: Outcome {
            first_tokens: vec![Duration::ZERO; jobs.len()],
            cached_tokens: 0,
            requests_per_worker: vec![0; fleet.workers],
            computed_per_worker: vec![0; fleet.workers],
            elapsed: Duration::ZERO,
        },
        unfinished: jobs.len(),
    };
    for (request, job) in jobs.iter().enumerate() {
        run.world.set(job.at, Event::Arrives(request));
    }
    run.world.set(SWEEP_EVERY, Event::Sweep);
    let mut computed = 0;
    while let Some(event) = run.world.next() {
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
        let now = self.world.now();
        match event {
            Event::Arrives(request) => self.on_arrival(now, request),
            Event::Computed { worker } => {
                if let Some((computed, next)) = self.engines[worker].finish(self.jobs) {
                    self.compute(now, worker, next);
                    self.on_computed(now, worker, computed);
                }
            }
            Event::Ends { worker, request } => {
                self.tell(now, request, News::Ended);
                self.outcome.requests_per_worker[worker] += 1;
                self.outcome.elapsed = now;
                self.unfinished -= 1;
            }
            Event::Told {
                worker,
                request,
                change,
            } => self.told.apply(worker, &self.jobs[request], &change),
            Event::Heard { request, news } => {
                let job = &self.jobs[request];
                for (place, router) in self.routers.iter_mut().enumerate() {
                    if place != job.router {
                        router.hear(now, request, job, news);
                    }
                }
            }
            Event::Sweep if self.unfinished > 0 => {
                for router in &self.routers {
                    router.sweep(now);
                }
                self.world.set(now + SWEEP_EVERY, Event::Sweep);
            }
            Event::Sweep => {}
        }
    }

    fn on_arrival(&mut self, now: Duration, request: usize) {
        let job = &self.jobs[request];
        let chosen = self.routers[job.router].choose(now, job, &self.told);
        let (worker, uncached_tokens) = chosen.expect("every modelled worker can be used");
        self.tell(
            now,
            request,
            News::Chosen {
                worker,
                uncached_tokens,
            },
        );
        let next = self.engines[worker].take(self.jobs, request);
        self.compute(now, worker, next);
    }

    fn on_computed(&mut self, now: Duration, worker: usize, computed: Computed) {
        let Computed {
            request,
            cached_tokens,
            change,
        } = computed;
        let job = &self.jobs[request];
        self.outcome.first_tokens[request] = now - job.at;
        self.outcome.cached_tokens += u64::from(cached_tokens);
        self.outcome.computed_per_worker[worker] += u64::from(job.input_tokens - cached_tokens);
        self.tell(now, request, News::FirstToken);
        let decode = self.fleet.decode * job.output_tokens.saturating_sub(1);
        self.world
            .set(now + decode, Event::Ends { worker, request });
        let told = Event::Told {
            worker,
            request,
            change,
        };
        self.world.set(now + self.fleet.event_lag, told);
    }

    fn compute(&mut self, now: Duration, worker: usize, next: Option<Duration>) {
        if let Some(time) = next {
            self.world.set(now + time, Event::Computed { worker });
        }
    }

    /// Its own router knows at once, the others when they hear of it.
    fn tell(&mut self, now: Duration, request: usize, news: News) {
        let job = &self.jobs[request];
        self.routers[job.router].hear(now, request, job, news);
        if let Some(lag) = self.fleet.sync_lag
            && self.routers.len() > 1
        {
            self.world.set(now + lag, Event::Heard { request, news });
        }
    }
}

#[cfg(test)]
mod tests;
