//! The dashboard's panels of what happens beside requests to workers: streams that went on elsewhere, gateways, webhooks,
//! batches, WebSockets, the export of traces. Each is `null` where there is nothing of the kind.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::counts::{gauge, label, series};
use super::panels::{by_label, histograms};
use crate::observe::metrics::Registry;
use crate::webhooks::EndpointReport;

const CONTINUATIONS: &str = "warmroute_stream_continuations_total";
const WEBHOOK_EVENTS: &str = "warmroute_webhook_events_total";

/// Endpoints of webhooks that are shown, those that fail first.
const MAX_ENDPOINTS: usize = 50;

pub(super) fn read(
    registry: &Registry,
    webhooks: &[EndpointReport],
    running: Option<Value>,
) -> BTreeMap<&'static str, Value> {
    BTreeMap::from([
        ("continuations", continuations(registry)),
        ("gateways", gateways(registry)),
        ("webhooks", endpoints(registry, webhooks)),
        ("batches", batches(registry, running)),
        ("websockets", websockets(registry)),
        ("traces", traces(registry)),
    ])
}

/// Streams whose worker was lost: how many went on on another one, and why others did not.
fn continuations(registry: &Registry) -> Value {
    let outcomes = by_label(registry, CONTINUATIONS, "outcome");
    if sum(&outcomes) == 0 {
        return Value::Null;
    }
    let mut reasons: BTreeMap<String, u64> = BTreeMap::new();
    for metric in series(registry, CONTINUATIONS) {
        if label(&metric, "outcome") == "refused" {
            let reason = label(&metric, "reason").to_owned();
            *reasons.entry(reason).or_default() += metric.get_counter().get_value() as u64;
        }
    }
    json!({"outcomes": outcomes, "refused": reasons})
}

/// Requests that a gateway carries. The metrics are there with the endpoint picker's listener.
fn gateways(registry: &Registry) -> Value {
    const OPEN: &str = "warmroute_endpoint_picker_exchanges";
    if registry.family(OPEN).is_none() {
        return Value::Null;
    }
    let decisions = histograms(registry, "warmroute_endpoint_picker_decision_seconds", "");
    json!({
        "open": gauge(registry, OPEN),
        "outcomes": by_label(registry, "warmroute_endpoint_picker_exchanges_total", "outcome"),
        "decisions": decisions.get(""),
    })
}

fn endpoints(registry: &Registry, reports: &[EndpointReport]) -> Value {
    if reports.is_empty() {
        return Value::Null;
    }
    let mut events: BTreeMap<String, BTreeMap<String, u64>> = BTreeMap::new();
    for metric in series(registry, WEBHOOK_EVENTS) {
        let of_endpoint = events.entry(label(&metric, "endpoint").to_owned());
        let outcome = label(&metric, "outcome").to_owned();
        let value = metric.get_counter().get_value() as u64;
        *of_endpoint.or_default().entry(outcome).or_default() += value;
    }
    let mut shown: Vec<&EndpointReport> = reports.iter().collect();
    shown.sort_by_key(|report| report.is_ok());
    let rows = shown.into_iter().take(MAX_ENDPOINTS);
    let rows = rows.map(|report| json!({"endpoint": report, "events": events.get(&report.name)}));
    json!({"endpoints": rows.collect::<Vec<_>>(), "all": reports.len()})
}

/// Batches that run here, and what this replica does for them.
fn batches(registry: &Registry, running: Option<Value>) -> Value {
    let Some(running) = running else {
        return Value::Null;
    };
    json!({
        "running": running,
        "lines": by_label(registry, "warmroute_batch_lines_total", "outcome"),
        "in_flight": gauge(registry, "warmroute_batch_lines_in_flight"),
        "waiting": gauge(registry, "warmroute_batch_lines_waiting"),
    })
}

fn websockets(registry: &Registry) -> Value {
    let open = gauge(registry, "warmroute_websocket_connections");
    let closed = by_label(
        registry,
        "warmroute_websocket_connections_closed_total",
        "reason",
    );
    let refused = by_label(
        registry,
        "warmroute_websocket_connections_refused_total",
        "reason",
    );
    if open == 0 && sum(&closed) == 0 && sum(&refused) == 0 {
        return Value::Null;
    }
    json!({
        "open": open,
        "closed": closed,
        "refused": sum(&refused),
        "memory": gauge(registry, "warmroute_websocket_memory_bytes"),
    })
}

fn traces(registry: &Registry) -> Value {
    let spans = by_label(registry, "warmroute_trace_spans_total", "outcome");
    match sum(&spans) {
        0 => Value::Null,
        _ => json!({"spans": spans}),
    }
}

fn sum(counts: &BTreeMap<String, u64>) -> u64 {
    counts.values().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_configured_and_has_not_happened_has_no_panel() {
        let registry = Registry::default();
        let panels = read(&registry, &[], None);
        assert_eq!(panels.len(), 6);
        assert!(panels.values().all(Value::is_null), "{panels:?}");
        // Counters that are registered and have not counted are no reason for a panel either.
        let labels = ["model", "outcome", "reason"];
        let streams = registry.counters(CONTINUATIONS, "S.", &labels);
        let spans = registry.counters("warmroute_trace_spans_total", "T.", &["outcome"]);
        spans.with_label_values(&["exported"]);
        streams.with_label_values(&["m", "continued", "none"]);
        assert!(read(&registry, &[], None).values().all(Value::is_null));
    }

    #[test]
    fn streams_that_broke_off_are_counted_by_what_became_of_them() {
        let registry = Registry::default();
        let labels = ["model", "outcome", "reason"];
        let streams = registry.counters(CONTINUATIONS, "S.", &labels);
        for (model, outcome, reason) in [
            ("a", "continued", "none"),
            ("b", "continued", "none"),
            ("a", "refused", "tool_call"),
        ] {
            streams.with_label_values(&[model, outcome, reason]).inc();
        }
        let expected =
            json!({"outcomes": {"continued": 2, "refused": 1}, "refused": {"tool_call": 1}});
        assert_eq!(read(&registry, &[], None)["continuations"], expected);
    }

    #[test]
    fn batches_are_shown_where_there_is_storage_for_them() {
        let registry = Registry::default();
        registry.gauge("warmroute_batch_lines_waiting", "W.").set(7);
        let running = json!({"batches": 2, "tenants": []});
        let expected = json!({
            "running": running.clone(),
            "lines": {},
            "in_flight": 0,
            "waiting": 7,
        });
        assert_eq!(read(&registry, &[], Some(running))["batches"], expected);
    }

    #[test]
    fn gateways_are_shown_as_soon_as_they_may_ask() {
        let registry = Registry::default();
        registry.gauge("warmroute_endpoint_picker_exchanges", "G.");
        let name = "warmroute_endpoint_picker_decision_seconds";
        let seconds = registry.histogram(name, "S.", &[1.0]);
        let panel = |registry: &Registry| read(registry, &[], None)["gateways"].clone();
        assert_eq!(panel(&registry)["open"], 0);
        seconds.observe(0.5);
        assert_eq!(panel(&registry)["decisions"], json!([1, 0.5]));
    }
}
