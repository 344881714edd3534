//! What was logged of a worker's health.

use tracing::{info, warn};

use crate::fleet::{Facts, Worker};

/// What was logged last of a worker's health. Each state is logged once.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum LoggedState {
    Up,
    /// It gets no requests, because it lists no models, for this reason.
    WithoutModels(String),
    Down,
}

impl LoggedState {
    pub(super) fn log(&self, worker: &Worker, facts: Option<&Facts>) {
        let address = worker.pool.address();
        match self {
            Self::Up => {
                let facts = facts.into_iter();
                let models = facts.flat_map(|facts| facts.models.keys());
                let models: Vec<&str> = models.map(|model| &**model).collect();
                info!(worker = %worker.name, ?models, "worker is up");
            }
            Self::WithoutModels(reason) => warn!(
                worker = %worker.name,
                address,
                reason,
                "worker is up but lists no models, so it gets no requests"
            ),
            Self::Down => {
                let error = worker.last_probe_error.load();
                let reason = error.as_deref().map_or("unknown", String::as_str);
                warn!(worker = %worker.name, address, reason, "worker is down");
            }
        }
    }
}
