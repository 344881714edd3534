//! Counts one request of a model from its plan to its end, however it ends.

use std::sync::Arc;
use std::time::Instant;

use hyper::StatusCode;

use super::metrics::Outcome;
use super::model::ModelState;
use super::worker_series::{WorkerSeries, count_unanswered};
use crate::prompt::Api;

/// One request in its model's metrics. Dropped before its end, the client has disconnected.
#[derive(Debug)]
pub(super) struct RequestCount {
    pub(super) model: Arc<ModelState>,
    pub(super) started: Instant,
    api: Api,
    is_counted: bool,
}

impl RequestCount {
    pub(super) fn new(model: Arc<ModelState>, api: Api, started: Instant) -> Self {
        model.in_flight.inc();
        Self {
            model,
            api,
            started,
            is_counted: false,
        }
    }

    pub(super) fn api(&self) -> Api {
        self.api
    }

    /// No worker's answer was passed on.
    pub(super) fn fail(mut self, outcome: Outcome) {
        self.count_unanswered(outcome);
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

    fn count_unanswered(&mut self, outcome: Outcome) {
        self.is_counted = true;
        count_unanswered(&self.model.families, &self.model.name, self.api, outcome);
    }
}

impl Drop for RequestCount {
    fn drop(&mut self) {
        if !self.is_counted {
            self.count_unanswered(Outcome::ClientDisconnected);
        }
        self.model.in_flight.dec();
    }
}
