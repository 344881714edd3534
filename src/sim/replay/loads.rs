//! The generated loads of `warmroute replay --loads`: every policy plays each of them, and is compared with the best.

mod generate;
mod table;

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use self::generate::{Agents, Generated, Pace};
pub(super) use self::table::{Compared, ComparedLoad, tables};
use super::results::PolicyResult;
use super::run;
use super::settings::{FleetSize, Settings};
use super::workload::Job;
use crate::config::Config;
use crate::observe;
use crate::sim::progress::{Bars, Progress};
use crate::sim::trace::Entry;

/// A load with its fleet.
pub(super) struct LoadCase<'a> {
    name: String,
    size: FleetSize,
    /// The speed-up of the arrivals, beside that of the arguments.
    speed: f64,
    draw: Draw<'a>,
}

/// Draws the requests from a seed.
type Draw<'a> = Box<dyn Fn(u64) -> Generated + Sync + 'a>;

/// Workers of the loads with a hot prefix; the others have as many as the arguments say.
const HOT_WORKERS: u32 = 4;

/// The loads whose names contain one of the words; all without words. Those of the trace only if there is one.
pub(super) fn matching<'a>(
    settings: &Settings,
    words: &[String],
    trace: &'a [Entry],
) -> Vec<LoadCase<'a>> {
    let mut cases = all(settings, trace);
    cases.retain(|case| words.is_empty() || words.iter().any(|word| case.name.contains(word)));
    cases
}

fn all<'a>(settings: &Settings, trace: &'a [Entry]) -> Vec<LoadCase<'a>> {
    let (size, block_tokens) = (settings.size(), settings.block_tokens.get());
    let hot_prefix = |in_flight: usize, prefix_tokens: u32| -> Draw<'a> {
        Box::new(move |seed| generate::hot_prefix(in_flight, prefix_tokens, block_tokens, seed))
    };
    let applications = |per_second: u32, answer_tokens: f64, requests: usize| -> Draw<'a> {
        let rates = [f64::from(per_second), answer_tokens];
        Box::new(move |seed| generate::applications(rates, requests, block_tokens, seed))
    };
    let agents = |sessions: usize, system_blocks: u32, pace: Pace| -> Draw<'a> {
        let agents = Agents {
            sessions,
            system_blocks,
            pace,
        };
        Box::new(move |seed| agents.generate(block_tokens, seed))
    };
    let part_of_trace =
        || -> Draw<'a> { Box::new(move |seed| generate::part_of_trace(trace, seed)) };
    let case = |name: String, size: FleetSize, draw: Draw<'a>| LoadCase {
        name,
        size,
        speed: 1.0,
        draw,
    };
    let mut cases = Vec::new();
    for slots in [64, 256] {
        for in_flight in [30, 100, 300] {
            for prefix_tokens in [500, 6_200, 30_000] {
                let size = FleetSize {
                    workers: HOT_WORKERS,
                    running_max: slots,
                    ..size
                };
                let name = format!("hot {prefix_tokens} x{in_flight} /{slots}");
                cases.push(case(name, size, hot_prefix(in_flight, prefix_tokens)));
            }
        }
    }
    for per_second in [10, 20, 30, 35] {
        let draw = applications(per_second, 250.0, 3_000);
        cases.push(case(format!("apps {per_second}/s"), size, draw));
    }
    for sessions in [75, 150, 250] {
        let draw = agents(sessions, 12, Pace::Slow);
        cases.push(case(format!("agents {sessions}"), size, draw));
    }
    for sessions in [12, 24, 40] {
        let size = FleetSize {
            workers: HOT_WORKERS,
            ..size
        };
        let draw = agents(sessions, 12, Pace::Quick);
        cases.push(case(format!("quick agents {sessions}"), size, draw));
    }
    let own_prompts = agents(150, 0, Pace::Slow);
    cases.push(case(
        "agents 150, own prompts".to_owned(),
        size,
        own_prompts,
    ));
    if !trace.is_empty() {
        for speed in [1.0, 1.5, 2.0, 2.5] {
            cases.push(LoadCase {
                speed,
                ..case(format!("trace x{speed}"), size, part_of_trace())
            });
        }
    }
    for per_second in [4, 6] {
        let draw = applications(per_second, 2_000.0, 1_500);
        cases.push(case(format!("long answers {per_second}/s"), size, draw));
    }
    for per_second in [40, 60] {
        let draw = applications(per_second, 20.0, 3_000);
        cases.push(case(format!("short answers {per_second}/s"), size, draw));
    }
    let little = |cache_blocks| FleetSize {
        cache_blocks,
        ..size
    };
    let draw = applications(20, 250.0, 3_000);
    cases.push(case(
        "little memory, apps 20/s".to_owned(),
        little(192),
        draw,
    ));
    let draw = applications(4, 2_000.0, 1_500);
    cases.push(case(
        "little memory, long 4/s".to_owned(),
        little(256),
        draw,
    ));
    if !trace.is_empty() {
        let name = "little memory, trace x1".to_owned();
        cases.push(case(name, little(384), part_of_trace()));
    }
    cases
}

impl LoadCase<'_> {
    fn jobs(&self, settings: &Settings, seed: u64) -> Vec<Job> {
        let mut workload = settings.workload();
        workload.seed = seed;
        workload.speed *= self.speed;
        (self.draw)(seed).jobs(&workload)
    }
}

/// Plays all loads with all policies and seeds, on all cores.
pub(super) fn compare(settings: &Settings, config: &Config, cases: &[LoadCase<'_>]) -> Compared {
    let policies = settings.compared_policies();
    let runs = cases.len() * settings.seeds.len();
    let bars = Bars::default();
    let progress = Progress::start(&bars, observe::now(), "loads", runs as u64);
    let progress = Mutex::new((progress, 0));
    let results: Vec<Mutex<Vec<PolicyResult>>> = (0..runs).map(|_| Mutex::default()).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        loop {
            let run = next.fetch_add(1, Ordering::Relaxed);
            let Some(result) = results.get(run) else {
                return;
            };
            let case = &cases[run / settings.seeds.len()];
            let seed = settings.seeds[run % settings.seeds.len()];
            *result.lock() = play(settings, config, case, seed);
            let (progress, done) = &mut *progress.lock();
            *done += 1;
            progress.show(observe::now(), *done, || case.name.clone());
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    std::thread::scope(|scope| {
        for _ in 0..threads.min(runs) {
            scope.spawn(work);
        }
    });
    let (progress, done) = progress.into_inner();
    progress.finish(done, String::new());
    bars.end();
    let mut results = results.into_iter().map(Mutex::into_inner);
    let loads = cases.iter().map(|case| ComparedLoad {
        load: case.name.clone(),
        seeds: results.by_ref().take(settings.seeds.len()).collect(),
    });
    Compared {
        loads: loads.collect(),
        policies,
    }
}

/// The result of each policy.
fn play(settings: &Settings, config: &Config, case: &LoadCase<'_>, seed: u64) -> Vec<PolicyResult> {
    let jobs = case.jobs(settings, seed);
    let times = settings.mean_times();
    let policies = settings.compared_policies().into_iter();
    policies
        .map(|policy| {
            let router = settings.router(config, policy, case.size);
            let fleet = settings.fleet(case.size);
            let outcome = run::run(&jobs, fleet, &router, observe::now(), |_| {});
            PolicyResult::new(policy, outcome, &jobs, &times, [0.0; 2])
        })
        .collect()
}
