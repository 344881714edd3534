//! `warmroute replay`: replays a recorded request trace in virtual time and compares routing policies with each other
//! and with upper bounds. Routing decisions and cache indexes are the router's own code; the engines are modelled.
//!
//! There are no sockets, no tokens and no HTTP. Their cost is measured by the benches and the demo.

mod engine;
mod formula;
mod lru;
mod plot;
mod policy;
mod reported;
mod results;
mod router;
mod run;
mod workload;

use std::fs::File;
use std::io::{self, BufReader, Write};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use serde_json::json;

use self::policy::ComparedPolicy;
use self::results::{PolicyResult, Report, TraceSummary};
use self::router::{CacheIndexKind, PrefillRates};
use self::run::Fleet;
use self::workload::{Job, WorkloadSettings};
use crate::config::Config;
use crate::observe;
use crate::routing::Policy;
use crate::sim::progress::{Bars, Progress};
use crate::sim::report;
use crate::sim::trace::{self, Entry};
use crate::units::parse_milliseconds;

/// Requests between two updates of the progress display.
const PROGRESS_INTERVAL: usize = 64;

#[derive(clap::Args, Clone, Debug, Serialize)]
pub struct Settings {
    /// Trace in Mooncake's format, one JSON object per line; - reads standard input.
    #[serde(skip)]
    trace: PathBuf,

    /// Configuration file whose `routing`, `predicted` and `unconfirmed` settings are used. Default: their defaults.
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,

    /// Policies to compare. Default: every policy but consistent_hash, and models of three policies of other routers:
    /// longest_prefix, prefix_threshold, dynamo_default.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    #[serde(skip)]
    policies: Vec<ComparedPolicy>,

    /// Number of modelled engines.
    #[arg(long, value_name = "COUNT", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4_096))]
    workers: u32,

    /// Prefix cache size of an engine. The default is about that of an 80 GB GPU with an 8B model and an 8-bit KV
    /// cache.
    #[arg(long, value_name = "TOKENS", default_value_t = 1_050_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    cache_tokens: u64,

    /// Prefill speed of an engine, which computes one prompt after the other.
    #[arg(long, value_name = "TOKENS", default_value_t = 12_000.0, value_parser = positive)]
    prefill_tokens_per_second: f64,

    /// Relative speeds of the engines, in turn: with 1,4 every second one computes prompts four times as fast as the others.
    /// Their mean is --prefill-tokens-per-second.
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', default_values_t = [1.0], value_parser = positive)]
    speeds: Vec<f64>,

    /// Relative speeds of the engines' answers, in turn, as --speeds; the mean of the times is --decode-time.
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', default_values_t = [1.0], value_parser = positive)]
    decode_speeds: Vec<f64>,

    /// What the router knows of the engines' speeds; `configured` is the prefill speeds alone.
    #[arg(long, value_name = "HOW", value_enum, default_value = "learnt")]
    rates: Rates,

    /// Inter-token latency.
    #[arg(long = "decode-time", value_name = "DURATION", default_value = "25ms", value_parser = parse_milliseconds)]
    decode_ms: u64,

    /// Speed-up of the arrivals: with 2, requests arrive twice as fast as recorded.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = positive)]
    speed: f64,

    /// Replay only this many requests from the start of the trace.
    #[arg(long, value_name = "COUNT")]
    requests: Option<usize>,

    /// Tokens per block id of the trace.
    #[arg(long, value_name = "TOKENS", default_value_t = NonZeroU32::new(512).expect("it is not 0"))]
    block_tokens: NonZeroU32,

    /// Delay each arrival by a random time up to this, for traces with rounded timestamps.
    #[arg(long = "jitter", value_name = "DURATION", default_value = "0s", value_parser = parse_milliseconds)]
    jitter_ms: u64,

    /// The cache index that cached prefixes are looked up in.
    #[arg(long, value_name = "INDEX", default_value = "exact", value_enum)]
    cache_index: CacheIndexKind,

    /// Delay of KV events.
    #[arg(long = "event-lag", value_name = "DURATION", default_value = "10ms", value_parser = parse_milliseconds)]
    event_lag_ms: u64,

    /// With the exact index: count blocks as cached when KV events report them, not as soon as a worker is chosen.
    #[arg(long)]
    no_predict_on_route: bool,

    /// Number of router replicas; each request goes to a random one.
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    routers: u32,

    /// Time between two reports of a router replica to the others. Default: replicas report nothing to each other, so
    /// each routes as one that hears of no other.
    #[arg(long = "sync-interval", value_name = "DURATION", value_parser = parse_milliseconds)]
    sync_ms: Option<u64>,

    /// What replicas report.
    #[arg(long, value_name = "WHAT", value_enum, default_value = "routed")]
    share: Shared,

    /// Route as a replica that hears of no other (`routing.advanced.alone_slack`). Default: with several routers that
    /// report nothing.
    #[arg(long, value_name = "BOOL")]
    alone: Option<bool>,

    /// Random seed; the same seed gives the same results.
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,

    /// Also write the results to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    json: Option<PathBuf>,

    /// Also draw the results to this file, as SVG.
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    plot: Option<PathBuf>,
}

/// What router replicas report to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
enum Shared {
    /// Their loads.
    Load,
    /// Their loads, and the blocks of the prompts that they routed.
    Routed,
}

/// What a router knows of its workers' speeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
enum Rates {
    /// Nothing: workers count as equal (`fleet.learn_prefill_rates: false`).
    Ignored,
    /// They are configured (`prefill_rate`).
    Configured,
    /// What first tokens show.
    Learnt,
}

/// Replays the trace with each policy, prints the table and writes the requested files.
pub fn run(settings: &Settings, config: &Config) -> io::Result<()> {
    let entries = read(settings).map_err(|error| with_path(&settings.trace, error))?;
    let jobs = workload::jobs(&entries, &settings.workload());
    drop(entries);
    let summary = TraceSummary::of(&jobs);
    let pooled_blocks = settings.cache_blocks() * settings.workers as usize;
    let bounds =
        [pooled_blocks, usize::MAX].map(|blocks| workload::cached_ratio_bound(&jobs, blocks));
    eprintln!("{}\n", settings.caption(&summary));
    let mut policies = Vec::new();
    for policy in settings.compared_policies() {
        policies.push(replay(settings, config, policy, &jobs, &summary, bounds));
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
    if let Some(path) = &settings.json {
        let mut text = serde_json::to_string_pretty(&report).map_err(io::Error::other)?;
        text.push('\n');
        std::fs::write(path, text).map_err(|error| with_path(path, error))?;
    }
    if let Some(path) = &settings.plot {
        let drawing = plot::svg(&report, &settings.caption(&summary));
        std::fs::write(path, drawing).map_err(|error| with_path(path, error))?;
    }
    Ok(())
}

/// Replays the trace with one policy and shows the progress.
fn replay(
    settings: &Settings,
    config: &Config,
    policy: ComparedPolicy,
    jobs: &[Job],
    summary: &TraceSummary,
    bounds: [f64; 2],
) -> PolicyResult {
    let started = observe::now();
    let names = ComparedPolicy::ALL.iter().map(|policy| policy.name());
    let width = names.map(str::len).max().unwrap_or(0);
    let name = format!("{:width$}", policy.name());
    let bars = Bars::default();
    let mut progress = Progress::start(&bars, started, &name, jobs.len() as u64);
    let router = router::Settings {
        policy,
        routing: config.routing.clone(),
        predicted: config.predicted.clone(),
        unconfirmed: config.kv_events.advanced.unconfirmed.clone(),
        cache_index: settings.cache_index,
        predicts_on_route: !settings.no_predict_on_route,
        workers: settings.workers as usize,
        cache_tokens: settings.cache_tokens,
        shares_routed: settings.shares_routed(),
        is_alone: settings.is_alone(),
        rates: settings.rates(),
    };
    let outcome = run::run(jobs, settings.fleet(), &router, started, |computed| {
        if computed.is_multiple_of(PROGRESS_INTERVAL) {
            progress.show(observe::now(), computed as u64, String::new);
        }
    });
    let result = PolicyResult::new(policy, outcome, summary.prompt_tokens, bounds);
    let cached = report::percent(result.cached_ratio);
    let mean = results::seconds(result.ttft_mean_seconds);
    progress.finish(
        jobs.len() as u64,
        format!("cached {cached}  TTFT mean {mean}"),
    );
    bars.end();
    result
}

fn read(settings: &Settings) -> io::Result<Vec<Entry>> {
    let requests = settings.requests.unwrap_or(usize::MAX);
    let entries = if settings.trace == Path::new("-") {
        trace::read(io::stdin().lock(), settings.block_tokens, requests)
    } else {
        let file = BufReader::new(File::open(&settings.trace)?);
        trace::read(file, settings.block_tokens, requests)
    };
    entries.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))
}

fn with_path(path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

fn positive(text: &str) -> Result<f64, String> {
    // With these bounds no time overflows.
    match text.parse::<f64>() {
        Ok(number) if (0.001..=1e9).contains(&number) => Ok(number),
        Ok(_) => Err("expected a number from 0.001 to 1000000000".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

impl Settings {
    fn compared_policies(&self) -> Vec<ComparedPolicy> {
        if !self.policies.is_empty() {
            return self.policies.clone();
        }
        // It needs a session key, which traces do not have.
        let consistent_hash = ComparedPolicy::Router(Policy::ConsistentHash);
        let all = ComparedPolicy::ALL.into_iter();
        all.filter(|policy| *policy != consistent_hash).collect()
    }

    fn workload(&self) -> WorkloadSettings {
        WorkloadSettings {
            block_tokens: self.block_tokens,
            speed: self.speed,
            jitter: Duration::from_millis(self.jitter_ms),
            routers: self.routers as usize,
            seed: self.seed,
        }
    }

    fn fleet(&self) -> Fleet {
        Fleet {
            workers: self.workers as usize,
            cache_blocks: self.cache_blocks(),
            block_tokens: self.block_tokens,
            prefill_tokens_per_second: self.prefill_rates(),
            decode: self.decode_times(),
            event_lag: Duration::from_millis(self.event_lag_ms),
            routers: self.routers as usize,
            sync_interval: self.sync_ms.map(Duration::from_millis),
        }
    }

    /// By engine.
    fn prefill_rates(&self) -> Vec<f64> {
        let speeds = self.speeds.iter().cycle().take(self.workers as usize);
        let mean = speeds.clone().sum::<f64>() / f64::from(self.workers);
        speeds
            .map(|speed| self.prefill_tokens_per_second * speed / mean)
            .collect()
    }

    /// By engine.
    fn decode_times(&self) -> Vec<Duration> {
        let speeds = self.decode_speeds.iter().cycle();
        let times = speeds.take(self.workers as usize).map(|speed| 1.0 / speed);
        let mean = times.clone().sum::<f64>() / f64::from(self.workers);
        let decode = Duration::from_millis(self.decode_ms);
        times.map(|time| decode.mul_f64(time / mean)).collect()
    }

    fn rates(&self) -> PrefillRates {
        match self.rates {
            Rates::Ignored => PrefillRates::Ignored,
            Rates::Configured => PrefillRates::Configured(self.prefill_rates()),
            Rates::Learnt => PrefillRates::Learnt,
        }
    }

    fn shares_routed(&self) -> bool {
        let is_shared = self.share == Shared::Routed;
        is_shared && self.routers > 1 && self.sync_ms.is_some()
    }

    fn is_alone(&self) -> bool {
        let hears_none = self.routers > 1 && self.sync_ms.is_none();
        self.alone.unwrap_or(hears_none)
    }

    fn cache_blocks(&self) -> usize {
        (self.cache_tokens / u64::from(self.block_tokens.get())) as usize
    }

    /// The trace and the fleet in a sentence: above the table and below the plot.
    fn caption(&self, trace: &TraceSummary) -> String {
        let of = |speeds: &[f64], what: &str| match speeds.iter().all(|it| *it == speeds[0]) {
            true => String::new(),
            false => {
                let speeds: Vec<_> = speeds.iter().map(f64::to_string).collect();
                format!("{what} {}", speeds.join(":"))
            }
        };
        let speeds =
            of(&self.speeds, " on average, speeds") + &of(&self.decode_speeds, ", answers at");
        format!(
            "{} requests with {} prompt tokens over {:.0} s; {} modelled engines with a cache of {} tokens, {} prompt tokens/s{speeds}",
            report::grouped(trace.requests as u64),
            report::grouped(trace.prompt_tokens),
            trace.span_seconds,
            report::grouped(self.workers.into()),
            report::grouped(self.cache_tokens),
            report::grouped(self.prefill_tokens_per_second as u64),
        )
    }
}
