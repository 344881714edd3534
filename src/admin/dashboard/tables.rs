//! The tables of the dashboard: workers, models, and ranks with KV events.

use std::time::Instant;

use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use super::changes::Condition;
use super::counts::{ITL, REQUESTS, TTFT, label, series};
use crate::fleet::Status;
use crate::ids::Model;
use crate::kv::subscriber::StatusBoard;
use crate::observe::metrics::Registry;
use crate::relay::Relay;

/// A table's rows: each is a list of the columns' values, which begins with the row's key.
pub(super) type Rows = Vec<Value>;

/// Ranks of one worker that are sent with its row. A click on it shows all.
const MAX_RANKS: usize = 64;

pub(super) const WORKER_COLUMNS: [&str; 24] = [
    "name",
    "role",
    "health",
    "breaker",
    "draining",
    "requests",
    "queued",
    "decode",
    "peer_requests",
    "peer_queued",
    "running",
    "waiting",
    "kv_usage",
    "prompt",
    "cached",
    "total",
    "model",
    "models",
    "ttft_count",
    "ttft_ms",
    "itl_count",
    "itl_ms",
    "prefill_rate",
    "rank_load",
];

pub(super) const MODEL_COLUMNS: [&str; 13] = [
    "name",
    "workers",
    "prefill",
    "in_flight",
    "routed",
    "expected",
    "prompt",
    "cached",
    "generated",
    "requests",
    "ttft_count",
    "ttft_ms",
    "adapter_in_gpu",
];

/// The metrics of the six before the last four.
const MODEL_METRICS: [&str; 6] = [
    "warmroute_requests_in_flight",
    "warmroute_routed_prompt_tokens_total",
    "warmroute_expected_cached_prompt_tokens_total",
    "warmroute_prompt_tokens_total",
    "warmroute_cached_prompt_tokens_total",
    "warmroute_generation_tokens_total",
];

pub(super) const RANK_COLUMNS: [&str; 14] = [
    "key",
    "worker",
    "rank",
    "model",
    "state",
    "reason",
    "connected",
    "lag_ms",
    "gaps",
    "resyncs",
    "events",
    "blocks",
    "ignored",
    "error",
];

/// What the log of changes compares of a worker.
pub(super) fn condition(status: &Status) -> Condition {
    Condition {
        health: status.health,
        breaker: status.worker.breaker.state(),
        is_draining: status.draining,
    }
}

/// The latency of one worker or one model since the router's start: the number of streamed answers and the sum of their times
/// to the first token; the number of gaps between tokens and their sum. Sums are in milliseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Latency {
    first: (u64, f64),
    gaps: (u64, f64),
}

/// Latencies by worker and by model. They take longer to read than a worker's gauges.
#[derive(Debug, Default)]
pub(super) struct Latencies {
    by_worker: FxHashMap<String, Latency>,
    by_model: FxHashMap<String, Latency>,
}

impl Latencies {
    pub(super) fn read(registry: &Registry) -> Self {
        let mut read = Self::default();
        for (name, is_first) in [(TTFT, true), (ITL, false)] {
            for metric in series(registry, name) {
                let histogram = metric.get_histogram();
                let (count, sum) = (histogram.get_sample_count(), histogram.get_sample_sum());
                let labels = [
                    (&mut read.by_worker, label(&metric, "worker")),
                    (&mut read.by_model, label(&metric, "model")),
                ];
                for (latencies, name) in labels {
                    let latency = latencies.entry(name.to_owned()).or_default();
                    let of_kind = if is_first {
                        &mut latency.first
                    } else {
                        &mut latency.gaps
                    };
                    of_kind.0 += count;
                    of_kind.1 += sum * 1e3;
                }
            }
        }
        read
    }
}

pub(super) fn workers(relay: &Relay, latencies: &Latencies) -> Rows {
    let snapshot = relay.fleet().snapshot();
    let mut workers: Vec<&Status> = snapshot.workers.iter().collect();
    workers.sort_by(|a, b| a.worker.name.cmp(&b.worker.name));
    let rows = workers.into_iter().map(|status| {
        let worker = &status.worker;
        let load = &worker.load;
        let reported = load.reported();
        let models = &status.facts.models;
        let latency = latencies.by_worker.get(&*worker.name);
        let latency = latency.copied().unwrap_or_default();
        json!([
            *worker.name,
            worker.role,
            status.health,
            worker.breaker.state().as_str(),
            status.draining,
            load.own_requests(),
            load.own_queued_tokens(),
            load.own_context_tokens(),
            load.peers_requests(),
            load.peers_queued_tokens(),
            reported.map(|reported| reported.running),
            reported.map(|reported| reported.waiting),
            // In thousandths.
            reported.map(|reported| (reported.kv_usage * 1e3).round() as u32),
            worker.usage.prompt_tokens(),
            worker.usage.cached_tokens(),
            load.total(),
            models.keys().next().map(|model| &**model),
            models.len(),
            latency.first.0,
            latency.first.1.round() as u64,
            latency.gaps.0,
            latency.gaps.1.round() as u64,
            worker.prefill_rate().map(|(rate, _)| rounded(rate)),
            rank_load(status),
        ])
    });
    rows.collect()
}

/// To two digits: a learnt rate changes a little with each prompt.
fn rounded(rate: f64) -> u64 {
    let unit = 10_f64.powi((rate.max(1.0).log10() as i32 - 1).max(0));
    ((rate / unit).round() * unit) as u64
}

/// Requests, queued and decoding tokens of each dp rank, of requests that are pinned to it. `None` for a worker without
/// several ranks.
fn rank_load(status: &Status) -> Option<Vec<[u64; 3]>> {
    let ranks = status.event_ranks();
    let own = |rank| {
        let own = status.worker.pinned.own(rank);
        [
            u64::from(own.requests),
            own.queued_tokens,
            own.context_tokens,
        ]
    };
    (ranks > 1).then(|| (0..ranks.min(MAX_RANKS) as u32).map(own).collect())
}

/// At how many workers each LoRA adapter is in the GPU, as far as known.
fn adapters_in_gpu(relay: &Relay) -> FxHashMap<Model, usize> {
    let mut counts: FxHashMap<Model, usize> = FxHashMap::default();
    for status in &relay.fleet().snapshot().workers {
        for adapter in status.worker.adapters.used().iter() {
            *counts.entry(adapter.clone()).or_default() += 1;
        }
    }
    counts
}

pub(super) fn models(relay: &Relay, registry: &Registry, latencies: &Latencies) -> Rows {
    let mut requests: FxHashMap<String, u64> = FxHashMap::default();
    for metric in series(registry, REQUESTS) {
        let of_model = requests.entry(label(&metric, "model").to_owned());
        *of_model.or_default() += metric.get_counter().get_value() as u64;
    }
    let mut counts: FxHashMap<String, [u64; MODEL_METRICS.len()]> = FxHashMap::default();
    for (index, name) in MODEL_METRICS.iter().enumerate() {
        for metric in series(registry, name) {
            let value = match index {
                0 => metric.get_gauge().get_value(),
                _ => metric.get_counter().get_value(),
            };
            let model = label(&metric, "model");
            if !counts.contains_key(model) {
                counts.insert(model.to_owned(), Default::default());
            }
            if let Some(of_model) = counts.get_mut(model) {
                of_model[index] = value.max(0.0) as u64;
            }
        }
    }
    let in_gpu = adapters_in_gpu(relay);
    let snapshot = relay.fleet().snapshot();
    let rows = snapshot.models.iter().map(|(name, group)| {
        let of_model = counts.get(&**name).copied().unwrap_or_default();
        let latency = latencies.by_model.get(&**name);
        let latency = latency.copied().unwrap_or_default();
        let [in_flight, routed, expected, prompt, cached, generated] = of_model;
        let prefill = if relay.is_disaggregated() {
            group.prefill_workers().len()
        } else {
            0
        };
        let in_gpu = || in_gpu.get(name).copied().unwrap_or(0);
        json!([
            **name,
            group.decode_workers().len(),
            prefill,
            in_flight,
            routed,
            expected,
            prompt,
            cached,
            generated,
            requests.get(&**name).copied().unwrap_or(0),
            latency.first.0,
            latency.first.1.round() as u64,
            group.is_adapter.then(in_gpu),
        ])
    });
    rows.collect()
}

pub(super) fn ranks(board: &StatusBoard, now: Instant) -> Rows {
    let rows = board.statuses(now).into_iter().map(|status| {
        let error = status.disconnect_reason.filter(|_| !status.connected);
        json!([
            format!("{}#{}", status.worker, status.rank),
            status.worker,
            status.rank,
            status.model,
            status.state,
            status.reason,
            status.connected,
            status.lag_ms.map(|lag| (lag * 10.0).round() / 10.0),
            status.counts.gaps,
            status.resyncs.values().sum::<u64>(),
            status.events,
            status.blocks.values().sum::<u64>(),
            status.ignored_events.values().sum::<u64>(),
            error.or(status.replay_error).or(status.decode_error),
        ])
    });
    rows.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_rounded_to_two_digits() {
        let check = |rate, expected| assert_eq!(rounded(rate), expected, "{rate}");
        check(0.0, 0);
        check(7.4, 7);
        check(99.7, 100);
        check(1_249.0, 1_200);
        check(12_512.0, 13_000);
        check(987_654.0, 990_000);
    }
}
