//! The generated loads of `warmroute replay --loads`: every policy plays each of them, and is compared with the best.

mod generate;
mod table;

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use self::generate::{Agents, Pace};
pub(super) use self::table::{Compared, ComparedLoad, tables};
use super::results::{Measured, PolicyResult};
use super::run;
use super::settings::{FleetSize, Settings};
use super::workload::Job;
use crate::config::Config;
use crate::observe;
use crate::sim::progress::{Bars, Progress};
use crate::sim::trace::Entry;

/// A load with its fleet.
#[derive(Clone, Debug)]
pub(super) struct LoadCase {
    name: String,
    requests: Requests,
    size: FleetSize,
}

#[derive(Clone, Copy, Debug)]
enum Requests {
    /// One prefix that all prompts have in common; a fixed number of requests in flight.
    HotPrefix {
        in_flight: usize,
        prefix_tokens: u32,
    },
    /// Applications, each with its system prompt and its length of answers.
    Applications {
        per_second: f64,
        answer_tokens: f64,
        requests: usize,
    },
    Agents(Agents),
    /// A part of the trace.
    Trace {
        speed: f64,
    },
}

/// Workers of the loads with a hot prefix; the others have as many as the arguments say.
const HOT_WORKERS: u32 = 4;

/// The loads whose names contain one of the words; all without words. Those of the trace only if there is one.
pub(super) fn matching(settings: &Settings, words: &[String], trace: &[Entry]) -> Vec<LoadCase> {
    let mut cases = all(settings, !trace.is_empty());
    cases.retain(|case| words.is_empty() || words.iter().any(|word| case.name.contains(word)));
    cases
}

fn all(settings: &Settings, has_trace: bool) -> Vec<LoadCase> {
    let size = settings.size();
    let mut cases = Vec::new();
    let mut add = |name: String, size, requests| {
        cases.push(LoadCase {
            name,
            requests,
            size,
        });
    };
    for slots in [64, 256] {
        for in_flight in [30, 100, 300] {
            for prefix_tokens in [500, 6_200, 30_000] {
                let size = FleetSize {
                    workers: HOT_WORKERS,
                    running_max: slots,
                    ..size
                };
                let name = format!("hot {prefix_tokens} x{in_flight} /{slots}");
                let requests = Requests::HotPrefix {
                    in_flight,
                    prefix_tokens,
                };
                add(name, size, requests);
            }
        }
    }
    for per_second in [10, 20, 30, 35] {
        add(
            format!("apps {per_second}/s"),
            size,
            applications(per_second, 250.0, 3_000),
        );
    }
    for sessions in [75, 150, 250] {
        let agents = Agents {
            sessions,
            system_blocks: 12,
            pace: Pace::Slow,
        };
        add(format!("agents {sessions}"), size, Requests::Agents(agents));
    }
    for sessions in [12, 24, 40] {
        let agents = Agents {
            sessions,
            system_blocks: 12,
            pace: Pace::Quick,
        };
        let size = FleetSize {
            workers: HOT_WORKERS,
            ..size
        };
        add(
            format!("quick agents {sessions}"),
            size,
            Requests::Agents(agents),
        );
    }
    let own_prompts = Agents {
        sessions: 150,
        system_blocks: 0,
        pace: Pace::Slow,
    };
    add(
        "agents 150, own prompts".to_owned(),
        size,
        Requests::Agents(own_prompts),
    );
    if has_trace {
        for speed in [1.0, 1.5, 2.0, 2.5] {
            add(format!("trace x{speed}"), size, Requests::Trace { speed });
        }
    }
    for per_second in [4, 6] {
        let requests = applications(per_second, 2_000.0, 1_500);
        add(format!("long answers {per_second}/s"), size, requests);
    }
    for per_second in [40, 60] {
        let requests = applications(per_second, 20.0, 3_000);
        add(format!("short answers {per_second}/s"), size, requests);
    }
    let little = |cache_blocks| FleetSize {
        cache_blocks,
        ..size
    };
    add(
        "little memory, apps 20/s".to_owned(),
        little(192),
        applications(20, 250.0, 3_000),
    );
    add(
        "little memory, long 4/s".to_owned(),
        little(256),
        applications(4, 2_000.0, 1_500),
    );
    if has_trace {
        let name = "little memory, trace x1".to_owned();
        add(name, little(384), Requests::Trace { speed: 1.0 });
    }
    cases
}

fn applications(per_second: u32, answer_tokens: f64, requests: usize) -> Requests {
    Requests::Applications {
        per_second: per_second.into(),
        answer_tokens,
        requests,
    }
}

impl LoadCase {
    fn jobs(&self, settings: &Settings, trace: &[Entry], seed: u64) -> Vec<Job> {
        let mut workload = settings.workload();
        workload.seed = seed;
        let block_tokens = settings.block_tokens.get();
        let generated = match self.requests {
            Requests::HotPrefix {
                in_flight,
                prefix_tokens,
            } => generate::hot_prefix(in_flight, prefix_tokens, block_tokens, seed),
            Requests::Applications {
                per_second,
                answer_tokens,
                requests,
            } => {
                let rates = [per_second, answer_tokens];
                generate::applications(rates, requests, block_tokens, seed)
            }
            Requests::Agents(agents) => agents.generate(block_tokens, seed),
            Requests::Trace { speed } => {
                workload.speed *= speed;
                generate::part_of_trace(trace, seed)
            }
        };
        generated.jobs(&workload)
    }
}

/// Plays all loads with all policies and seeds, on all cores.
pub(super) fn compare(
    settings: &Settings,
    config: &Config,
    cases: &[LoadCase],
    trace: &[Entry],
) -> Compared {
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
            *result.lock() = play(settings, config, case, trace, seed);
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
fn play(
    settings: &Settings,
    config: &Config,
    case: &LoadCase,
    trace: &[Entry],
    seed: u64,
) -> Vec<PolicyResult> {
    let jobs = case.jobs(settings, trace, seed);
    let measured = Measured {
        jobs: &jobs,
        times: settings.mean_times(),
        bounds: [0.0; 2],
    };
    let policies = settings.compared_policies().into_iter();
    policies
        .map(|policy| {
            let router = settings.router(config, policy, case.size);
            let fleet = settings.fleet(case.size);
            let outcome = run::run(&jobs, fleet, &router, observe::now(), |_| {});
            PolicyResult::new(policy, outcome, &measured)
        })
        .collect()
}
