//! The counts that the charts are drawn from: sums over all workers and models, read from the metrics.

use prometheus::proto::Metric;
use serde::Serialize;

use crate::fleet::Status;
use crate::fleet::health::Health;
use crate::http::circuit_breaker::State;
use crate::observe::metrics::Registry;
use crate::relay::{INTER_TOKEN_LATENCY_SECONDS, Relay, TIME_TO_FIRST_TOKEN_SECONDS};
use crate::routing::Reason;

pub(super) const TTFT: &str = "warmroute_time_to_first_token_seconds";
pub(super) const ITL: &str = "warmroute_inter_token_latency_seconds";
pub(super) const REQUESTS: &str = "warmroute_requests_total";
const DECISIONS: &str = "warmroute_routing_decisions_total";

/// How requests end, as the charts show it.
const ENDS: [&str; 10] = [
    "complete",
    "status_4xx",
    "status_5xx",
    "client_disconnected",
    "refused",
    "worker_failed",
    "router_failed",
    "stream_idle_timeout",
    "request_timeout",
    "other",
];

/// Counters that are added up whatever their labels: the name in the page's data, and the metric.
const SUMS: [(&str, &str); 9] = [
    ("routed", "warmroute_routed_prompt_tokens_total"),
    ("expected", "warmroute_expected_cached_prompt_tokens_total"),
    ("random", "warmroute_random_worker_prompt_tokens_total"),
    (
        "random_cached",
        "warmroute_random_worker_cached_prompt_tokens_total",
    ),
    ("prompt", "warmroute_prompt_tokens_total"),
    ("cached", "warmroute_cached_prompt_tokens_total"),
    ("generated", "warmroute_generation_tokens_total"),
    ("retries", "warmroute_retries_total"),
    ("too_many", ERRORS),
];

/// The router's own errors, of which 429 are shown beside what failed.
const ERRORS: &str = "warmroute_request_errors_total";

pub(super) const GAUGES: [&str; 6] = [
    "in_flight",
    "queued_tokens",
    "context_tokens",
    "workers",
    "usable_workers",
    "models",
];

/// The names of a sample's counters, in order.
#[derive(Debug, Serialize)]
pub(super) struct Columns {
    ends: [&'static str; ENDS.len()],
    reasons: Vec<&'static str>,
    sums: Vec<&'static str>,
    /// Upper bounds of the buckets in seconds; one more bucket has what is above them.
    ttft: &'static [f64],
    itl: &'static [f64],
    gauges: [&'static str; GAUGES.len()],
}

impl Columns {
    pub(super) fn new() -> Self {
        Self {
            ends: ENDS,
            reasons: Reason::ALL.map(Reason::as_str).to_vec(),
            sums: SUMS.map(|(name, _)| name).to_vec(),
            ttft: TIME_TO_FIRST_TOKEN_SECONDS,
            itl: INTER_TOKEN_LATENCY_SECONDS,
            gauges: GAUGES,
        }
    }
}

/// The sums over all series now.
pub(super) fn read(registry: &Registry) -> Vec<u64> {
    let mut ends = [0; ENDS.len()];
    for metric in series(registry, REQUESTS) {
        let (status, outcome) = (label(&metric, "status"), label(&metric, "outcome"));
        ends[end_of(status, outcome)] += metric.get_counter().get_value() as u64;
    }
    let mut reasons = [0; Reason::ALL.len()];
    for metric in series(registry, DECISIONS) {
        let reason = label(&metric, "reason");
        if let Some(index) = Reason::ALL
            .iter()
            .position(|known| known.as_str() == reason)
        {
            reasons[index] += metric.get_counter().get_value() as u64;
        }
    }
    let sums = SUMS.map(|(_, name)| {
        let counted = series(registry, name).into_iter();
        let counted = counted.filter(|row| name != ERRORS || label(row, "status") == "429");
        counted
            .map(|row| row.get_counter().get_value() as u64)
            .sum()
    });
    let ttft = buckets(&series(registry, TTFT), TIME_TO_FIRST_TOKEN_SECONDS.len());
    let itl = buckets(&series(registry, ITL), INTER_TOKEN_LATENCY_SECONDS.len());
    let counters = ends.into_iter().chain(reasons).chain(sums);
    counters.chain(ttft).chain(itl).collect()
}

/// The gauges of a sample, in the order of [`GAUGES`].
pub(super) fn gauges(relay: &Relay, registry: &Registry) -> Vec<u64> {
    let snapshot = relay.fleet().snapshot();
    let workers = || snapshot.workers.iter();
    let queued = workers().map(|status| status.worker.load.queued_tokens());
    let context = workers().map(|status| status.worker.load.context_tokens());
    vec![
        gauge(registry, "warmroute_requests_in_flight"),
        queued.sum(),
        context.sum(),
        snapshot.workers.len() as u64,
        workers().filter(|status| is_usable(status)).count() as u64,
        snapshot.models.len() as u64,
    ]
}

/// A worker that can get requests.
fn is_usable(status: &Status) -> bool {
    status.health == Health::Up && !status.draining && status.worker.breaker.state() != State::Open
}

pub(super) fn series(registry: &Registry, name: &str) -> Vec<Metric> {
    let family = registry.family(name);
    family.map_or_else(Vec::new, |mut family| family.take_metric())
}

/// The sum of a gauge's series.
pub(super) fn gauge(registry: &Registry, name: &str) -> u64 {
    let values = series(registry, name).into_iter();
    let sum: f64 = values.map(|metric| metric.get_gauge().get_value()).sum();
    sum.max(0.0) as u64
}

pub(super) fn label<'a>(metric: &'a Metric, name: &str) -> &'a str {
    let mut labels = metric.get_label().iter();
    let found = labels.find(|label| label.name() == name);
    found.map_or("", |label| label.value())
}

fn end_of(status: &str, outcome: &str) -> usize {
    let end = match outcome {
        "complete" if status.starts_with('5') => "status_5xx",
        "complete" if status.starts_with('4') => "status_4xx",
        "not_queued" => "refused",
        known => known,
    };
    let place = ENDS.iter().position(|known| *known == end);
    place.unwrap_or(ENDS.len() - 1)
}

/// Each bucket's own count, over all series; the last is of what is above all bounds.
fn buckets(series: &[Metric], bounds: usize) -> Vec<u64> {
    let mut counts = vec![0; bounds + 1];
    for metric in series {
        let histogram = metric.get_histogram();
        let mut below = 0;
        for (count, bucket) in counts.iter_mut().zip(histogram.get_bucket()) {
            *count += bucket.cumulative_count().saturating_sub(below);
            below = bucket.cumulative_count();
        }
        counts[bounds] += histogram.get_sample_count().saturating_sub(below);
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_end_of_a_request_is_counted_once() {
        let check = |status, outcome, expected| assert_eq!(ENDS[end_of(status, outcome)], expected);
        check("200", "complete", "complete");
        check("404", "complete", "status_4xx");
        check("503", "complete", "status_5xx");
        check("200", "client_disconnected", "client_disconnected");
        check("none", "worker_failed", "worker_failed");
        check("none", "refused", "refused");
        check("none", "not_queued", "refused");
        check("none", "router_failed", "router_failed");
        check("200", "a later one", "other");
    }

    #[test]
    fn of_the_routers_own_errors_only_429_are_counted() {
        let registry = Registry::default();
        let errors = registry.counters(ERRORS, "E.", &["status", "code"]);
        for (status, code) in [("429", "queue_full"), ("429", "rate_limit"), ("404", "x")] {
            errors.with_label_values(&[status, code]).inc();
        }
        let place = SUMS.iter().position(|(name, _)| *name == "too_many");
        let at = ENDS.len() + Reason::ALL.len() + place.unwrap();
        assert_eq!(read(&registry)[at], 2);
    }

    #[test]
    fn buckets_are_counted_one_by_one_over_all_series() {
        let registry = Registry::default();
        let histograms = registry.histograms("h", "H.", &[1.0, 2.0], &["worker"]);
        for (worker, value) in [("a", 0.5), ("a", 1.5), ("b", 1.5), ("b", 9.0)] {
            histograms.with_label_values(&[worker]).observe(value);
        }
        assert_eq!(buckets(&series(&registry, "h"), 2), [1, 2, 1]);
        assert_eq!(buckets(&[], 2), [0, 0, 0]);
    }
}
