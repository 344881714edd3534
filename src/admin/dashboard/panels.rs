//! The dashboard's small panels: each is one JSON value, sent when it has changed.

use std::collections::BTreeMap;
use std::time::Instant;

use serde_json::{Value, json};

use super::counts::{label, series};
use super::limits;
use crate::admin::pairs::PairsRow;
use crate::kv::tokenizer_check::TokenizerCheck;
use crate::observe::metrics::Registry;
use crate::peers::Peers;
use crate::relay::Relay;

/// The rows that a panel shows at most of one metric.
const MAX_SERIES: usize = 100;

/// Metrics of the queue that are shown as they are, where requests have waited.
const QUEUE: [&str; 2] = [
    "warmroute_queue_refusals_total",
    "warmroute_queue_wait_seconds",
];
/// Models whose queues are shown.
const MAX_QUEUES: usize = 12;

/// All panels but the one of the Responses API.
pub(super) fn read(
    relay: &Relay,
    peers: &Peers,
    tokenizer_check: &TokenizerCheck,
    registry: &Registry,
    now: Instant,
) -> BTreeMap<&'static str, Value> {
    let mut panels = BTreeMap::new();
    panels.insert("policy", json!(relay.policy()));
    panels.insert("tokenizer", tokenizer(tokenizer_check, now));
    panels.insert("peers", json!(peers.status(now)));
    if let Some((connector, pairs)) = relay.pairs() {
        let value = json!({
            "pairs": PairsRow::new(connector, pairs),
            "transfers": by_label(registry, "warmroute_kv_transfers_total", "outcome"),
            "requests": by_label(registry, "warmroute_disaggregated_requests_total", "disaggregated"),
            "phases": histograms(registry, "warmroute_disaggregated_phase_seconds", "phase"),
        });
        panels.insert("pairs", value);
    }
    panels.insert("tenants", limits::read(relay.tenants(), registry));
    panels.insert("queue", queue(relay, registry));
    panels.insert(
        "tokenization",
        json!({
            "prompts": by_label(registry, "warmroute_tokenizer_prompts_total", "outcome"),
            "fallbacks": by_label(registry, "warmroute_tokenization_fallbacks_total", "reason"),
        }),
    );
    panels
}

/// What waits for room, by model and class; `null` without a queue.
fn queue(relay: &Relay, registry: &Registry) -> Value {
    let status = relay.queues().status();
    if !status.is_on() {
        return Value::Null;
    }
    let metrics = QUEUE.into_iter().flat_map(|name| values(registry, name));
    let metrics: Vec<Value> = metrics.collect();
    json!({"models": status.busiest(MAX_QUEUES), "metrics": metrics})
}

/// The panel of the Responses API, with the page that operators read.
pub(super) fn responses(page: Value, registry: &Registry) -> Value {
    json!({
        "page": page,
        "operations": histograms(registry, "warmroute_store_operation_duration_seconds", "operation"),
        "failures": by_label(registry, "warmroute_store_operations_total", "outcome"),
    })
}

/// What the tokenizer check found, without the tokens that differ: they are a client's text.
fn tokenizer(check: &TokenizerCheck, now: Instant) -> Value {
    let statuses = check.statuses(now).into_iter();
    let rows = statuses.map(|status| {
        json!({
            "model": status.model,
            "prompts": status.prompts,
            "mismatch": status.mismatch,
            "confirmed_ratio": status.confirmed_ratio,
            "misses": status.consecutive_misses,
            "checks": status.checks,
            "untrusted": status.workers.iter().filter(|worker| !worker.is_trusted).count(),
        })
    });
    rows.collect()
}

/// A counter's values, added up by one label.
pub(super) fn by_label(registry: &Registry, name: &str, by: &str) -> BTreeMap<String, u64> {
    let mut sums = BTreeMap::new();
    for metric in series(registry, name) {
        let value = metric.get_counter().get_value() as u64;
        *sums.entry(label(&metric, by).to_owned()).or_default() += value;
    }
    sums
}

/// Number and sum of a histogram's values, added up by one label.
pub(super) fn histograms(
    registry: &Registry,
    name: &str,
    by: &str,
) -> BTreeMap<String, (u64, f64)> {
    let mut sums: BTreeMap<String, (u64, f64)> = BTreeMap::new();
    for metric in series(registry, name) {
        let histogram = metric.get_histogram();
        let sum = sums.entry(label(&metric, by).to_owned()).or_default();
        sum.0 += histogram.get_sample_count();
        sum.1 += histogram.get_sample_sum();
    }
    sums
}

/// Each series of a metric as it is.
fn values(registry: &Registry, name: &str) -> Vec<Value> {
    let Some(family) = registry.family(name) else {
        return Vec::new();
    };
    let kind = family.get_field_type();
    let shown = family.get_metric().iter().take(MAX_SERIES);
    let values = shown.map(|metric| {
        let labels = metric.get_label().iter();
        let labels: Vec<&str> = labels.map(|label| label.value()).collect();
        let (kind, value, sum) = match kind {
            prometheus::proto::MetricType::COUNTER => {
                ("counter", metric.get_counter().get_value(), None)
            }
            prometheus::proto::MetricType::GAUGE => {
                ("gauge", metric.get_gauge().get_value(), None)
            }
            _ => {
                let histogram = metric.get_histogram();
                let count = histogram.get_sample_count() as f64;
                ("histogram", count, Some(histogram.get_sample_sum()))
            }
        };
        json!({"metric": name, "labels": labels.join(", "), "kind": kind, "value": value, "sum": sum})
    });
    values.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_that_is_absent_has_no_rows_and_a_present_one_has_its_series() {
        let registry = Registry::default();
        let rows = |registry: &Registry| -> Vec<Value> {
            let names = ["queue_requests", "queue_seconds"].into_iter();
            names.flat_map(|name| values(registry, name)).collect()
        };
        assert!(rows(&registry).is_empty());
        let gauges = registry.gauges("queue_requests", "Q.", &["model", "class"]);
        gauges.with_label_values(&["<script>", "high"]).set(3);
        let waited = registry.histograms("queue_seconds", "Q.", &[1.0], &["model"]);
        waited.with_label_values(&["m"]).observe(0.5);
        let found = rows(&registry);
        assert_eq!(found.len(), 2);
        // Labels are in the order of their names.
        assert_eq!(found[0]["labels"], "high, <script>");
        assert_eq!(found[0]["value"], 3.0);
        assert_eq!(found[1]["sum"], 0.5);
    }

    #[test]
    fn values_are_added_up_by_one_label() {
        let registry = Registry::default();
        let counters = registry.counters("c", "C.", &["model", "outcome"]);
        for model in ["a", "b"] {
            counters.with_label_values(&[model, "completed"]).inc_by(2);
        }
        let sums = by_label(&registry, "c", "outcome");
        assert_eq!(sums, BTreeMap::from([("completed".to_owned(), 4)]));
    }
}
