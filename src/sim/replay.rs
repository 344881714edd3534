//! `warmroute replay`: replays a recorded request trace, or generated loads, in virtual time and compares routing policies
//! with each other and with upper bounds. Routing decisions and cache indexes are the router's own code; the engines are
//! modelled: their steps, slots and KV memory.
//!
//! There are no sockets, no tokens and no HTTP. Their cost is measured by the benches and the demo. Engines of the model
//! never fail, load no adapters, have one tier and one rank, and compute prompts and answers in the same steps; clients
//! never leave.

mod engine;
mod formula;
mod loads;
mod lru;
mod plot;
mod policy;
mod reported;
mod results;
mod router;
mod run;
mod settings;
mod workload;

use std::fs::File;
use std::io::{self, BufReader, Write};
use std::path::Path;

use serde_json::json;

use self::policy::ComparedPolicy;
use self::results::{PolicyResult, Report, TraceSummary};
pub use self::settings::Settings;
use self::workload::Job;
use crate::config::Config;
use crate::observe;
use crate::sim::progress::{Bars, Progress};
use crate::sim::report;
use crate::sim::trace::{self, Entry};

/// Requests between two updates of the progress display.
const PROGRESS_INTERVAL: usize = 64;

/// Replays the trace or the loads with each policy, prints the table and writes the requested files.
pub fn run(settings: &Settings, config: &Config) -> io::Result<()> {
    let trace = settings.trace.as_deref();
    let entries = match trace {
        Some(path) => read(settings, path).map_err(|error| with_path(path, error))?,
        None => Vec::new(),
    };
    match &settings.loads {
        Some(words) => compare_loads(settings, config, words, &entries),
        None => replay_trace(settings, config, entries),
    }
}

fn replay_trace(settings: &Settings, config: &Config, entries: Vec<Entry>) -> io::Result<()> {
    let jobs = workload::jobs(&entries, &settings.workload());
    drop(entries);
    let summary = TraceSummary::of(&jobs);
    let size = settings.size();
    let pooled_blocks = size.cache_blocks * size.workers as usize;
    let bounds =
        [pooled_blocks, usize::MAX].map(|blocks| workload::cached_ratio_bound(&jobs, blocks));
    eprintln!("{}\n", settings.caption(&summary));
    let mut policies = Vec::new();
    for policy in settings.compared_policies() {
        policies.push(replay(settings, config, policy, &jobs, bounds));
    }
    let report = Report {
        settings: json!({ "replay": settings, "routing": config.routing }),
        trace: summary,
        pooled_bound: bounds[0],
        infinite_bound: bounds[1],
        policies,
    };
    let bounds = format!(
        "Upper bounds: a single LRU cache of the fleet's size would serve {} of prompt tokens, an unlimited one {}.",
        report::percent(report.pooled_bound),
        report::percent(report.infinite_bound),
    );
    let table = results::table(&report.policies);
    write!(io::stdout(), "\n{table}\n{bounds}\n")?;
    write_json(settings, &report)?;
    if let Some(path) = &settings.plot {
        let drawing = plot::svg(&report, &settings.caption(&summary));
        std::fs::write(path, drawing).map_err(|error| with_path(path, error))?;
    }
    Ok(())
}

fn compare_loads(
    settings: &Settings,
    config: &Config,
    words: &[String],
    trace: &[Entry],
) -> io::Result<()> {
    let loads = loads::matching(settings, words, trace);
    if loads.is_empty() {
        let message = format!("no load has a name with {}", words.join(" or "));
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    let compared = loads::compare(settings, config, &loads);
    write!(io::stdout(), "\n{}", loads::tables(&compared))?;
    let report = json!({
        "settings": { "replay": settings, "routing": config.routing, "seeds": settings.seeds },
        "loads": compared.loads,
    });
    write_json(settings, &report)
}

fn write_json(settings: &Settings, report: &impl serde::Serialize) -> io::Result<()> {
    let Some(path) = &settings.json else {
        return Ok(());
    };
    let mut text = serde_json::to_string_pretty(report).map_err(io::Error::other)?;
    text.push('\n');
    std::fs::write(path, text).map_err(|error| with_path(path, error))
}

/// Replays the trace with one policy and shows the progress.
fn replay(
    settings: &Settings,
    config: &Config,
    policy: ComparedPolicy,
    jobs: &[Job],
    bounds: [f64; 2],
) -> PolicyResult {
    let started = observe::now();
    let names = ComparedPolicy::ALL.iter().map(|policy| policy.name());
    let width = names.map(str::len).max().unwrap_or(0);
    let name = format!("{:width$}", policy.name());
    let bars = Bars::default();
    let mut progress = Progress::start(&bars, started, &name, jobs.len() as u64);
    let size = settings.size();
    let router = settings.router(config, policy, size);
    let outcome = run::run(jobs, settings.fleet(size), &router, started, |computed| {
        if computed.is_multiple_of(PROGRESS_INTERVAL) {
            progress.show(observe::now(), computed as u64, String::new);
        }
    });
    let result = PolicyResult::new(policy, outcome, jobs, &settings.mean_times(), bounds);
    let cached = report::percent(result.cached_ratio);
    let mean = results::seconds(result.ttft_mean_seconds);
    progress.finish(
        jobs.len() as u64,
        format!("cached {cached}  TTFT mean {mean}"),
    );
    bars.end();
    result
}

fn read(settings: &Settings, path: &Path) -> io::Result<Vec<Entry>> {
    let requests = settings.requests.unwrap_or(usize::MAX);
    let entries = if path == Path::new("-") {
        trace::read(io::stdin().lock(), settings.block_tokens, requests)
    } else {
        let file = BufReader::new(File::open(path)?);
        trace::read(file, settings.block_tokens, requests)
    };
    entries.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))
}

fn with_path(path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
