//! A trace replayed in virtual time: the real decision, over the real indexes, for modelled engines.
//! It says what a policy would have made of those requests, beside others and beside what is possible.
//!
//! No sockets, no tokens, no HTTP: what those cost is the business of benches and of the demo.

mod engine;
mod formula;
mod line;
mod lru;
mod plot;
mod result;
mod router;
mod run;
mod told;
mod workload;

use std::fs::File;
use std::io::{self, BufReader, Write};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use serde_json::json;

use self::line::Line;
use self::result::{Report, Row, TraceFacts};
use self::router::Knowledge;
use self::run::Fleet;
use self::workload::{Job, Shape};
use crate::config::Config;
use crate::observe;
use crate::sim::progress::Progress;
use crate::sim::report;
use crate::sim::trace::{self, Entry};

/// Between two looks at how far a replay has come, in requests.
const SHOW_EVERY: usize = 64;

#[derive(clap::Args, Clone, Debug, Serialize)]
pub struct Settings {
    /// Requests in the format of Mooncake's traces, one JSON object a line; - for standard input.
    #[serde(skip)]
    trace: PathBuf,

    /// Take `routing` and `predicted` from this configuration. Default: their defaults.
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,

    /// What to compare. Default: every policy that needs no session key, and models of three formulas
    /// that others use: longest_prefix, prefix_threshold, dynamo_default.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    #[serde(skip)]
    policies: Vec<Line>,

    /// Modelled engines behind the routers.
    #[arg(long, value_name = "COUNT", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4_096))]
    workers: u32,

    /// Size of a worker's prefix cache. The default is about what an 80 GB GPU has beside an 8B model
    /// with its cache in 8 bits.
    #[arg(long, value_name = "TOKENS", default_value_t = 1_050_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    cache_tokens: u64,

    /// How fast a worker computes prompts, one after the other.
    #[arg(long, value_name = "TOKENS", default_value_t = 12_000.0, value_parser = positive)]
    prefill_tokens_per_second: f64,

    /// Between two tokens of an answer.
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 25, value_parser = clap::value_parser!(u64).range(0..=60_000))]
    token_ms: u64,

    /// Let requests come so many times as fast as they were recorded.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = positive)]
    speed: f64,

    /// Replay only the first requests of the trace.
    #[arg(long, value_name = "COUNT")]
    requests: Option<usize>,

    /// Tokens that one of the trace's block ids stands for.
    #[arg(long, value_name = "TOKENS", default_value_t = NonZeroU32::new(512).expect("it is not 0"))]
    block_tokens: NonZeroU32,

    /// Move each arrival by up to so much, for traces with rounded times.
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..=3_600_000))]
    dither_ms: u64,

    /// What routers know of caches.
    #[arg(long, value_name = "WHAT", default_value = "events", value_enum)]
    knowledge: Knowledge,

    /// How late cache events come.
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(0..=3_600_000))]
    event_lag_ms: u64,

    /// Believe in blocks when events tell of them, and not as soon as their worker is chosen.
    #[arg(long)]
    no_predict_on_route: bool,

    /// Routers in front of the fleet; each request comes to one of them by chance.
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    routers: u32,

    /// How late routers hear of each other's choices. Default: they never do.
    #[arg(long, value_name = "MILLISECONDS", value_parser = clap::value_parser!(u64).range(0..=3_600_000))]
    sync_ms: Option<u64>,

    /// Another seed breaks ties otherwise; the same one makes the same replay.
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,

    /// Write the results here too.
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    json: Option<PathBuf>,

    /// Draw them, as SVG.
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    plot: Option<PathBuf>,
}

/// Replays a trace for each policy, prints the table and writes the files.
pub fn run(settings: &Settings, config: &Config) -> io::Result<()> {
    let entries = read(settings).map_err(|error| of_file(&settings.trace, error))?;
    let jobs = workload::jobs(&entries, &settings.shape());
    drop(entries);
    let facts = TraceFacts::of(&jobs);
    let pooled_blocks = settings.cache_blocks() * settings.workers as usize;
    let bounds = [pooled_blocks, usize::MAX].map(|blocks| workload::pooled_bound(&jobs, blocks));
    eprintln!("{}", settings.introduction(&facts));
    let mut policies = Vec::new();
    for line in settings.lines() {
        policies.push(play(settings, config, line, &jobs, &facts, bounds));
    }
    let report = Report {
        settings: json!({ "replay": settings, "routing": config.routing }),
        trace: facts,
        pooled_bound: bounds[0],
        infinite_bound: bounds[1],
        policies,
    };
    let bounds = format!(
        "One cache of the fleet's size would serve {} of all prompt tokens, an endless one {}.",
        report::percent(report.pooled_bound),
        report::percent(report.infinite_bound),
    );
    let table = result::table(&report.policies);
    write!(io::stdout(), "\n{table}\n{bounds}\n")?;
    if let Some(path) = &settings.json {
        let mut text = serde_json::to_string_pretty(&report).map_err(io::Error::other)?;
        text.push('\n');
        std::fs::write(path, text).map_err(|error| of_file(path, error))?;
    }
    if let Some(path) = &settings.plot {
        let drawing = plot::svg(&report, &settings.caption(&facts));
        std::fs::write(path, drawing).map_err(|error| of_file(path, error))?;
    }
    Ok(())
}

/// One policy's replay, with its progress shown.
fn play(
    settings: &Settings,
    config: &Config,
    line: Line,
    jobs: &[Job],
    facts: &TraceFacts,
    bounds: [f64; 2],
) -> Row {
    let started = observe::now();
    let width = Line::ALL.iter().map(|line| line.name().len()).max();
    let name = format!("{:width$}", line.name(), width = width.unwrap_or(0));
    let mut progress = Progress::start(started, &name, jobs.len() as u64);
    let router = router::Settings {
        line,
        routing: config.routing.clone(),
        predicted: config.predicted.clone(),
        knowledge: settings.knowledge,
        expects: !settings.no_predict_on_route,
        workers: settings.workers as usize,
        cache_tokens: settings.cache_tokens,
    };
    let outcome = run::run(jobs, settings.fleet(), &router, started, |computed| {
        if computed.is_multiple_of(SHOW_EVERY) {
            progress.show(observe::now(), computed as u64, String::new);
        }
    });
    let row = Row::new(line, outcome, facts.prompt_tokens, bounds);
    let cached = report::percent(row.cached_share);
    let mean = result::seconds(row.ttft_mean_s);
    progress.finish(
        jobs.len() as u64,
        format!("cached {cached}  TTFT mean {mean}"),
    );
    row
}

fn read(settings: &Settings) -> io::Result<Vec<Entry>> {
    let requests = settings.requests.unwrap_or(usize::MAX);
    let entries = if settings.trace == Path::new("-") {
        trace::read(io::stdin().lock(), settings.block_tokens, requests)
    } else {
        let file = BufReader::new(File::open(&settings.trace)?);
        trace::read(file, settings.block_tokens, requests)
    };
    entries.map_err(|problem| io::Error::new(io::ErrorKind::InvalidData, problem.to_string()))
}

fn of_file(path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

fn positive(text: &str) -> Result<f64, String> {
    // Within these no time overflows.
    match text.parse::<f64>() {
        Ok(number) if (0.001..=1e9).contains(&number) => Ok(number),
        Ok(_) => Err("must be from 0.001 to 1000000000".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

impl Settings {
    fn lines(&self) -> Vec<Line> {
        if self.policies.is_empty() {
            let sensible =
                |line: &Line| *line != Line::Ours(crate::routing::Policy::ConsistentHash);
            Line::ALL.into_iter().filter(sensible).collect()
        } else {
            self.policies.clone()
        }
    }

    fn shape(&self) -> Shape {
        Shape {
            block_tokens: self.block_tokens,
            speed: self.speed,
            dither: Duration::from_millis(self.dither_ms),
            routers: self.routers as usize,
            seed: self.seed,
        }
    }

    fn fleet(&self) -> Fleet {
        Fleet {
            workers: self.workers as usize,
            cache_blocks: self.cache_blocks(),
            block_tokens: self.block_tokens,
            prefill_tokens_per_second: self.prefill_tokens_per_second,
            decode: Duration::from_millis(self.token_ms),
            event_lag: Duration::from_millis(self.event_lag_ms),
            routers: self.routers as usize,
            sync_lag: self.sync_ms.map(Duration::from_millis),
        }
    }

    fn cache_blocks(&self) -> usize {
        (self.cache_tokens / u64::from(self.block_tokens.get())) as usize
    }

    fn introduction(&self, trace: &TraceFacts) -> String {
        format!(
            "{} requests with {} prompt tokens, over {:.0} s; {}.\n",
            report::grouped(trace.requests as u64),
            report::grouped(trace.prompt_tokens),
            trace.span_s,
            self.fleet_text(),
        )
    }

    fn caption(&self, trace: &TraceFacts) -> String {
        format!(
            "{} requests over {:.0} s, {}",
            report::grouped(trace.requests as u64),
            trace.span_s,
            self.fleet_text(),
        )
    }

    fn fleet_text(&self) -> String {
        format!(
            "{} modelled engines of {} cached tokens, {} prompt tokens/s",
            report::grouped(self.workers.into()),
            report::grouped(self.cache_tokens),
            report::grouped(self.prefill_tokens_per_second as u64),
        )
    }
}
