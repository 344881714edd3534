//! What is counted of responses.

use prometheus::{HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};

use crate::observe::metrics::Registry;
use crate::store::Status;

/// Items of a history: a first question, a chat, an agent's day.
const ITEMS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0,
];
/// Bytes of it as JSON.
const BYTES: &[f64] = &[1e3, 4e3, 16e3, 64e3, 256e3, 1e6, 4e6, 16e6, 64e6];
/// Seconds to read it from the store.
const SECONDS: &[f64] = &[
    0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.0,
];

#[derive(Clone, Debug)]
pub(super) struct Metrics {
    in_flight: IntGaugeVec,
    terminal: IntCounterVec,
    history_items: HistogramVec,
    history_bytes: HistogramVec,
    history_seconds: HistogramVec,
    degraded: IntCounterVec,
    pub(super) locked: IntCounter,
}

impl Metrics {
    pub(super) fn new(registry: &Registry) -> Self {
        Self {
            in_flight: registry.gauges(
                "warmroute_responses_in_flight",
                "Responses that are being made, by whether they are stored or run in the background.",
                &["mode"],
            ),
            terminal: registry.counters(
                "warmroute_responses_terminal_total",
                "Responses that ended, by how.",
                &["status"],
            ),
            history_items: registry.histograms(
                "warmroute_responses_history_items",
                "Items that came before a request's own, where it goes on from something.",
                ITEMS,
                &[],
            ),
            history_bytes: registry.histograms(
                "warmroute_responses_history_bytes",
                "Bytes of those items, as stored.",
                BYTES,
                &[],
            ),
            history_seconds: registry.histograms(
                "warmroute_responses_history_seconds",
                "Time to read them from the store.",
                SECONDS,
                &[],
            ),
            degraded: registry.counters(
                "warmroute_responses_not_stored_total",
                "Responses that were to be stored and were answered all the same, or were lost, \
                 because the store did not take them, by what was done.",
                &["outcome"],
            ),
            locked: registry.counter(
                "warmroute_responses_conversation_locked_total",
                "Requests for a conversation on which another response ran.",
            ),
        }
    }

    pub(super) fn on_history(&self, items: usize, bytes: usize) {
        let none: &[&str] = &[];
        self.history_items
            .with_label_values(none)
            .observe(items as f64);
        self.history_bytes
            .with_label_values(none)
            .observe(bytes as f64);
    }

    pub(super) fn on_history_read(&self, seconds: f64) {
        let none: &[&str] = &[];
        self.history_seconds
            .with_label_values(none)
            .observe(seconds);
    }

    pub(super) fn on_end(&self, status: Status) {
        self.terminal.with_label_values(&[status.as_str()]).inc();
    }

    /// Served without being stored.
    pub(super) fn on_degraded(&self) {
        self.degraded.with_label_values(&["served"]).inc();
    }

    /// Made, and kept from the client, who was told that it would be stored.
    pub(super) fn on_lost(&self) {
        self.degraded.with_label_values(&["withheld"]).inc();
    }

    pub(super) fn begin(&self, is_stored: bool) -> InFlight {
        let mode = if is_stored { "stored" } else { "unstored" };
        InFlight::new(self.in_flight.with_label_values(&[mode]))
    }

    pub(super) fn begin_background(&self) -> InFlight {
        InFlight::new(self.in_flight.with_label_values(&["background"]))
    }

    /// For the operator's page: in flight, and ended by status.
    pub(super) fn counts(&self) -> (i64, Vec<(&'static str, u64)>) {
        let modes = ["stored", "unstored", "background"]
            .map(|mode| self.in_flight.with_label_values(&[mode]).get());
        let ended = Status::ALL
            .into_iter()
            .filter(|status| status.is_terminal());
        let ended = ended.map(|status| {
            let count = self.terminal.with_label_values(&[status.as_str()]).get();
            (status.as_str(), count)
        });
        (modes.iter().sum(), ended.collect())
    }
}

/// Counts one response for as long as it lives.
#[must_use = "dropping the guard ends the response"]
#[derive(Debug)]
pub(super) struct InFlight(IntGauge);

impl InFlight {
    fn new(gauge: IntGauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.dec();
    }
}
