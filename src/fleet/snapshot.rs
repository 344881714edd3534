//! The fleet at one moment: every worker's status, and for each model the workers that serve it. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::group::{self, Group};
use super::health::Health;
use super::model_set::ModelSet;
use super::status::Status;
use crate::ids::Model;

#[derive(Debug, Default)]
pub struct Snapshot {
    pub workers: Vec<Status>,
    /// Every model that a listed worker serves.
    pub models: BTreeMap<Model, Arc<Group>>,
}

impl Snapshot {
    /// Groups the workers by model; each comes with the models that it serves. A model keeps its group, then empty, while
    /// all of its workers are down: requests for it fail as unavailable, not as unknown.
    pub(super) fn new(workers: Vec<(Status, Arc<ModelSet>)>, topology: &str) -> Self {
        let models = group::group(&workers, topology);
        let workers = workers.into_iter().map(|(status, _)| status).collect();
        Self { workers, models }
    }

    /// True if at least one worker takes whole requests.
    pub fn is_ready(&self) -> bool {
        self.models.values().any(|group| !group.decode().is_empty())
    }

    /// True if a worker was not probed yet, so that its models are unknown.
    pub fn has_unprobed_workers(&self) -> bool {
        self.workers
            .iter()
            .any(|status| status.health == Health::Unknown)
    }

    /// Whether workers may yet serve models that are not known: none is listed, or one has never said what it serves.
    pub fn may_serve_others(&self) -> bool {
        self.workers.is_empty()
            || self
                .workers
                .iter()
                .any(|status| status.facts.models.is_empty())
    }

    /// The model of a request that names none: the only one, if there is only one.
    pub fn only_model(&self) -> Option<&Arc<Group>> {
        let mut groups = self.models.values();
        groups.next().filter(|_| groups.next().is_none())
    }
}
