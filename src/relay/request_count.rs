//! Counts one request of a model from its plan to its end, however it ends.

use std::sync::Arc;
use std::time::Instant;

use hyper::StatusCode;

use super::account::worker_series::WorkerSeries;
use super::answer::engine_answer::Usage;
use super::failure::types::Outcome;
use super::model::ModelState;
use crate::limits::Charge;
use crate::prompt::Api;

/// One request in its model's metrics. Dropped before its end, the client has disconnected.
#[derive(Debug)]
pub(super) struct RequestCount {
    pub(super) model: Arc<ModelState>,
    pub(super) started: Instant,
    api: Api,
    /// The API that the engine was sent.
    pub(super) wire: Api,
    is_counted: bool,
    /// The most tokens that its only choice may have.
    pub(super) max_tokens: Option<u64>,
    /// In the limits of its tenant.
    charge: Option<Charge>,
}

impl RequestCount {
    pub(super) fn new(
        model: Arc<ModelState>,
        api: Api,
        started: Instant,
        charge: Option<Charge>,
    ) -> Self {
        model.in_flight.inc();
        Self {
            model,
            api,
            wire: api,
            started,
            is_counted: false,
            max_tokens: None,
            charge,
        }
    }

    /// The request goes to a worker now: unless it is a line of a batch, it is charged even if its client leaves.
    pub(super) fn on_sent(&mut self) {
        if let Some(charge) = &mut self.charge {
            charge.on_sent();
        }
    }

    /// Corrects the charge by what an answer used: the engine's own numbers, or else the output tokens that passed.
    /// A line of a batch whose answer was given up is not charged: it is sent again.
    pub(super) fn settle(
        &mut self,
        status: StatusCode,
        outcome: Outcome,
        usage: Option<&Usage>,
        passed: u64,
    ) {
        let Some(mut charge) = self.charge.take() else {
            return;
        };
        match usage {
            _ if charge.is_line() && outcome == Outcome::ClientDisconnected => charge.refund(),
            _ if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
                charge.refund();
            }
            _ if !status.is_success() => charge.refund_tokens(),
            Some(usage) => charge.use_tokens(
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.output_tokens,
            ),
            None => charge.use_output(passed),
        }
    }

    /// No worker's answer was passed on: everything is given back. The request is counted with the error that its client gets.
    pub(super) fn fail(mut self) {
        if let Some(charge) = &mut self.charge {
            charge.refund();
        }
        self.is_counted = true;
    }

    pub(super) fn end(
        &mut self,
        now: Instant,
        series: &WorkerSeries,
        status: StatusCode,
        outcome: Outcome,
    ) {
        if std::mem::replace(&mut self.is_counted, true) {
            return;
        }
        let took = now.saturating_duration_since(self.started);
        series.duration.observe(took.as_secs_f64());
        series.count(self.api, status, outcome);
    }
}

impl Drop for RequestCount {
    fn drop(&mut self) {
        if !self.is_counted {
            let ModelState { families, name, .. } = &*self.model;
            families.count_unanswered(name, self.api.as_str(), Outcome::ClientDisconnected);
        }
        self.model.in_flight.dec();
    }
}
