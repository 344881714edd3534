//! Metrics of the endpoint picker. Requests have those of the API and of the relay besides.

use std::sync::Arc;
use std::time::Duration;

use crate::observe::metrics::{metric_table, words};

words! {
    /// How an exchange ended.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) enum Outcome {
        /// A worker was chosen, and its answer passed through.
        Picked = "picked",
        /// The router itself answered: with an error, or with what needs no worker.
        Refused = "refused",
        /// The gateway ended the stream before: its client has left, or the worker's connection broke.
        GatewayLeft = "gateway_left",
        /// The gateway sent what makes no sense.
        Malformed = "malformed",
        /// The gateway sent nothing.
        Silent = "silent",
    }
}

/// From a choice at once to one after a long wait.
const DECISION_SECONDS: &[f64] = &[
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0, 10.0,
];

metric_table! {
    #[derive(Debug)]
    pub(super) struct Metrics {
        open: gauge "warmroute_endpoint_picker_exchanges" "Requests of gateways that the endpoint picker has open.",
        ended: counters "warmroute_endpoint_picker_exchanges_total" ["outcome"]
            "Requests of gateways by outcome: `picked` (a worker was chosen and its answer passed through), `refused` (the \
             router itself answered), `gateway_left` (the gateway ended the stream: its client left, or the worker's connection \
             broke), `malformed`, `silent` (no message came for 5 seconds).",
        decision: histogram "warmroute_endpoint_picker_decision_seconds" in DECISION_SECONDS
            "Time from the end of a request's body to the answer with the chosen worker; with a queue, waiting included.",
    }
}

impl Metrics {
    pub(super) fn open(self: &Arc<Self>) -> Open {
        self.open.inc();
        Open {
            metrics: self.clone(),
            outcome: Outcome::GatewayLeft,
        }
    }

    pub(super) fn on_decision(&self, took: Duration) {
        self.decision.observe(took.as_secs_f64());
    }
}

/// One exchange; it is open until this is dropped.
#[derive(Debug)]
pub(super) struct Open {
    metrics: Arc<Metrics>,
    outcome: Outcome,
}

impl Open {
    pub(super) fn end(mut self, outcome: Outcome) {
        self.outcome = outcome;
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.metrics.open.dec();
        let labels = [self.outcome.as_str()];
        self.metrics.ended.with_label_values(&labels).inc();
    }
}
