//! What is counted of background work.

use prometheus::{Histogram, IntCounter, IntCounterVec, IntGauge};

use crate::observe::metrics::Registry;

/// Seconds from a cancel on.
const SECONDS: &[f64] = &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0];

#[derive(Clone, Debug)]
pub(super) struct Metrics {
    pub(super) running: IntGauge,
    pub(super) refused: IntCounterVec,
    pub(super) orphans: IntCounterVec,
    pub(super) stopped: IntCounterVec,
    pub(super) readers: IntCounterVec,
    pub(super) cancel_seconds: Histogram,
    pub(super) cancel_stop_seconds: Histogram,
    pub(super) event_bytes: IntCounter,
}

impl Metrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let none: &[&str] = &[];
        Self {
            running: registry
                .gauges(
                    "warmroute_background_running",
                    "Background responses that this replica runs, those that wait included.",
                    &[],
                )
                .with_label_values(none),
            refused: registry.counters(
                "warmroute_background_refused_total",
                "Background responses that were not begun, by why.",
                &["reason"],
            ),
            orphans: registry.counters(
                "warmroute_background_orphans_total",
                "Responses of lost or stopping replicas that this one took over, by what it did.",
                &["action"],
            ),
            stopped: registry.counters(
                "warmroute_background_stopped_total",
                "Background responses that this replica stopped running before their end, by why.",
                &["reason"],
            ),
            readers: registry.counters(
                "warmroute_background_readers_total",
                "Streams of background responses, by how they were begun.",
                &["kind"],
            ),
            cancel_seconds: registry
                .histograms(
                    "warmroute_background_cancel_seconds",
                    "Time until a cancel was answered.",
                    SECONDS,
                    &[],
                )
                .with_label_values(none),
            cancel_stop_seconds: registry
                .histograms(
                    "warmroute_background_cancel_stop_seconds",
                    "Time from a cancel, of this replica or another, until the engine's connection was closed here. \
                     Of another's by the store's clock and this replica's, which must agree.",
                    SECONDS,
                    &[],
                )
                .with_label_values(none),
            event_bytes: registry.counter(
                "warmroute_background_event_bytes_total",
                "Bytes of events of background responses that were stored.",
            ),
        }
    }
}
