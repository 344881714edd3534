//! The command-line arguments of a replay, and the fleet and the routers that they describe.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use super::engine::EngineSettings;
use super::policy::ComparedPolicy;
use super::results::TraceSummary;
use super::router::{self, CacheIndexKind, Rates};
use super::run::Fleet;
use super::workload::WorkloadSettings;
use crate::config::Config;
use crate::queue;
use crate::routing::Policy;
use crate::sim::report;
use crate::sim::step_time::{AnswerTimes, StepTimes};
use crate::units::parse_milliseconds;

#[derive(clap::Args, Clone, Debug, Serialize)]
pub struct Settings {
    /// Trace in Mooncake's format, one JSON object per line; - reads standard input.
    #[arg(required_unless_present = "loads")]
    #[serde(skip)]
    pub(super) trace: Option<PathBuf>,

    /// Play generated loads instead of the trace, or only those whose names contain one of the words: a prefix that all
    /// prompts share, applications, agents, long and short answers, little KV memory. With a trace, also the first 3,000
    /// requests of it at several speeds. Prints each policy's mean times as ratios to the best policy's.
    #[arg(long, value_name = "WORDS", value_delimiter = ',', num_args = 0.., require_equals = true)]
    #[serde(skip)]
    pub(super) loads: Option<Vec<String>>,

    /// With --loads: the seeds of the loads. Times are means over them.
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', default_values_t = [1])]
    pub(super) seeds: Vec<u64>,

    /// Configuration file whose `routing`, `queue`, `predicted` and `unconfirmed` settings are used. Default: their defaults.
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,

    /// Policies to compare. Default: every policy but consistent_hash, and models of policies of other routers
    /// (longest_prefix, prefix_threshold, dynamo_default, vllm_router, lmetric, llm_d).
    /// cache_aware_queue is cache_aware with the queue, as by default; the others send each request at once.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    #[serde(skip)]
    pub(super) policies: Vec<ComparedPolicy>,

    /// Number of modelled engines.
    #[arg(long, value_name = "COUNT", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4_096))]
    pub(super) workers: u32,

    /// Prefix cache size of an engine. The default is about that of an 80 GB GPU with an 8B model and an 8-bit KV
    /// cache.
    #[arg(long, value_name = "TOKENS", default_value_t = 1_050_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    pub(super) cache_tokens: u64,

    /// Prefill speed of an engine.
    #[arg(long, value_name = "TOKENS", default_value_t = 12_000.0, value_parser = positive)]
    pub(super) prefill_tokens_per_second: f64,

    /// Relative speeds of the engines, in turn: with 1,4 every second one computes prompts four times as fast as the others.
    /// Their mean is --prefill-tokens-per-second.
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', default_values_t = [1.0], value_parser = positive)]
    pub(super) speeds: Vec<f64>,

    /// Relative speeds of the engines' answers, in turn, as --speeds; the mean of the times is what --decode-time and the
    /// like say.
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', default_values_t = [1.0], value_parser = positive)]
    pub(super) decode_speeds: Vec<f64>,

    /// What the router knows of the engines' speeds; `configured` is the prefill speeds alone.
    #[arg(long, value_name = "HOW", value_enum, default_value = "learnt")]
    pub(super) rates: Rates,

    /// Duration of a step, which generates one token for every running answer and computes prompts: without what its
    /// tokens take.
    #[arg(long = "decode-time", value_name = "DURATION", default_value = "6ms", value_parser = parse_milliseconds)]
    pub(super) decode_ms: u64,

    #[command(flatten)]
    pub(super) answer_times: AnswerTimes,

    /// Maximum tokens computed in one step; longer prompts are computed in chunks.
    #[arg(long, value_name = "TOKENS", default_value = "8192")]
    pub(super) batch_tokens_max: NonZeroU32,

    /// Maximum running requests of an engine; further ones wait.
    #[arg(
        long,
        visible_alias = "max-num-seqs",
        value_name = "REQUESTS",
        default_value = "256"
    )]
    pub(super) running_max: NonZeroU32,

    /// Speed-up of the arrivals: with 2, requests arrive twice as fast as recorded.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = positive)]
    pub(super) speed: f64,

    /// Replay only this many requests from the start of the trace.
    #[arg(long, value_name = "COUNT")]
    pub(super) requests: Option<usize>,

    /// Tokens per block id of the trace.
    #[arg(long, value_name = "TOKENS", default_value = "512")]
    pub(super) block_tokens: NonZeroU32,

    /// Delay each arrival by a random time up to this, for traces with rounded timestamps.
    #[arg(long = "jitter", value_name = "DURATION", default_value = "0s", value_parser = parse_milliseconds)]
    pub(super) jitter_ms: u64,

    /// The cache index that cached prefixes are looked up in.
    #[arg(long, value_name = "INDEX", default_value = "exact", value_enum)]
    pub(super) cache_index: CacheIndexKind,

    /// Delay of KV events.
    #[arg(long = "event-lag", value_name = "DURATION", default_value = "10ms", value_parser = parse_milliseconds)]
    pub(super) event_lag_ms: u64,

    /// With the exact index: count blocks as cached when KV events report them, not as soon as a worker is chosen.
    #[arg(long)]
    pub(super) no_predict_on_route: bool,

    /// Number of router replicas; each request goes to a random one.
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(super) routers: u32,

    /// Time between two reports of a router replica to the others. Default: replicas report nothing to each other, so
    /// each routes as one that hears of no other.
    #[arg(long = "sync-interval", value_name = "DURATION", value_parser = parse_milliseconds)]
    pub(super) sync_ms: Option<u64>,

    /// What replicas report.
    #[arg(long, value_name = "WHAT", value_enum, default_value = "routed")]
    pub(super) share: Shared,

    /// Route as a replica that hears of no other. Default: with several routers that
    /// report nothing.
    #[arg(long, value_name = "BOOL")]
    pub(super) alone: Option<bool>,

    /// Random seed; the same seed gives the same results.
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub(super) seed: u64,

    /// Also write the results to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub(super) json: Option<PathBuf>,

    /// Also draw the results to this file, as SVG.
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub(super) plot: Option<PathBuf>,
}

/// What router replicas report to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(super) enum Shared {
    /// Their loads.
    Load,
    /// Their loads, and the blocks of the prompts that they routed.
    Routed,
}

/// How many engines there are, and how much each can hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct FleetSize {
    pub(super) workers: u32,
    pub(super) cache_blocks: usize,
    pub(super) running_max: u32,
}

impl Settings {
    pub(super) fn compared_policies(&self) -> Vec<ComparedPolicy> {
        if !self.policies.is_empty() {
            return self.policies.clone();
        }
        // It needs a session key, which traces do not have.
        let consistent_hash = ComparedPolicy::Router(Policy::ConsistentHash);
        let all = ComparedPolicy::ALL.into_iter();
        all.filter(|policy| *policy != consistent_hash).collect()
    }

    pub(super) fn workload(&self) -> WorkloadSettings {
        WorkloadSettings {
            block_tokens: self.block_tokens,
            speed: self.speed,
            jitter: Duration::from_millis(self.jitter_ms),
            routers: self.routers as usize,
            seed: self.seed,
        }
    }

    pub(super) fn size(&self) -> FleetSize {
        FleetSize {
            workers: self.workers,
            cache_blocks: (self.cache_tokens / u64::from(self.block_tokens.get())) as usize,
            running_max: self.running_max.get(),
        }
    }

    pub(super) fn fleet(&self, size: FleetSize) -> Fleet {
        Fleet {
            engines: self.engines(size),
            block_tokens: self.block_tokens,
            event_lag: Duration::from_millis(self.event_lag_ms),
            routers: self.routers as usize,
            sync_interval: self.sync_ms.map(Duration::from_millis),
        }
    }

    pub(super) fn router(
        &self,
        config: &Config,
        policy: ComparedPolicy,
        size: FleetSize,
    ) -> router::Settings {
        router::Settings {
            policy,
            routing: config.routing.clone(),
            queue: match &config.queue {
                queue::Waiting::On(settings) => settings.as_ref().clone(),
                queue::Waiting::Off => queue::Settings::default(),
            },
            predicted: config.predicted.clone(),
            unconfirmed: config.kv_events.advanced.unconfirmed.clone(),
            cache_index: self.cache_index,
            predicts_on_route: !self.no_predict_on_route,
            workers: size.workers as usize,
            cache_tokens: size.cache_blocks as u64 * u64::from(self.block_tokens.get()),
            shares_routed: self.shares_routed(),
            is_alone: self.is_alone(),
            rates: self.rates,
            prefill_rates: self.prefill_rates(size),
        }
    }

    /// How long the steps of the mean engine take.
    pub(super) fn mean_times(&self) -> StepTimes {
        StepTimes::new(
            Duration::from_millis(self.decode_ms),
            self.answer_times,
            self.prefill_tokens_per_second,
        )
    }

    /// By worker.
    fn engines(&self, size: FleetSize) -> Vec<EngineSettings> {
        let step = Duration::from_millis(self.decode_ms);
        let rates = self.prefill_rates(size);
        let factors = answer_factors(&self.decode_speeds, size.workers);
        let workers = rates.into_iter().zip(factors);
        workers
            .map(|(rate, factor)| EngineSettings {
                times: StepTimes::new(step, self.answer_times, rate).with_slower_answers(factor),
                batch_tokens_max: self.batch_tokens_max.get(),
                running_max: size.running_max,
                cache_blocks: size.cache_blocks,
                block_tokens: self.block_tokens.get(),
            })
            .collect()
    }

    /// The prefill rate of each worker. Their mean is what the arguments say.
    fn prefill_rates(&self, size: FleetSize) -> Vec<f64> {
        let speeds = self.speeds.iter().cycle().take(size.workers as usize);
        let mean_speed = speeds.clone().sum::<f64>() / f64::from(size.workers);
        speeds
            .map(|speed| self.prefill_tokens_per_second * speed / mean_speed)
            .collect()
    }

    fn shares_routed(&self) -> bool {
        let is_shared = self.share == Shared::Routed;
        is_shared && self.routers > 1 && self.sync_ms.is_some()
    }

    fn is_alone(&self) -> bool {
        let hears_none = self.routers > 1 && self.sync_ms.is_none();
        self.alone.unwrap_or(hears_none)
    }

    /// The trace and the fleet in a sentence: above the table and below the plot.
    pub(super) fn caption(&self, trace: &TraceSummary) -> String {
        let of = |speeds: &[f64], what: &str| {
            if speeds.iter().all(|speed| *speed == speeds[0]) {
                String::new()
            } else {
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

/// How many times as long as the mean engine each worker takes for answers.
fn answer_factors(speeds: &[f64], workers: u32) -> Vec<f64> {
    let speeds = speeds.iter().cycle().take(workers as usize);
    let times = speeds.map(|speed| 1.0 / speed);
    let mean = times.clone().sum::<f64>() / f64::from(workers);
    times.map(|time| time / mean).collect()
}

fn positive(text: &str) -> Result<f64, String> {
    // With these bounds no time overflows.
    match text.parse::<f64>() {
        Ok(number) if (0.001..=1e9).contains(&number) => Ok(number),
        Ok(_) => Err("expected a number from 0.001 to 1000000000".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}
