//! What the relays of all configurations share of workers and models. Tasks of the process have it in place of a relay,
//! which keeps the tokenizers of its configuration in memory.

use std::sync::Arc;
use std::time::Instant;

use rustc_hash::FxHashSet;

use super::account::usage::Usage;
use super::core::Relay;
use super::model::Shared;
use super::prefill_decode::PinnedBlocks;
use super::wait::Queues;
use crate::fleet::{Snapshot, Worker};
use crate::ids::WorkerId;
use crate::observe;

/// The state of workers and models that outlives a configuration.
#[derive(Clone, Debug)]
pub struct LastingState {
    /// `None` if requests are not disaggregated.
    pinned: Option<Arc<PinnedBlocks>>,
    models: Arc<Shared>,
    queues: Arc<Queues>,
    usage: Arc<Usage>,
}

impl Relay {
    /// What this relay shares with those of other configurations.
    pub fn lasting_state(&self) -> LastingState {
        let prefill_decode = self.prefill_decode.as_ref();
        LastingState {
            pinned: prefill_decode.map(|shared| shared.pinned.clone()),
            models: self.models.shared.clone(),
            queues: self.queues().clone(),
            usage: self.usage.clone(),
        }
    }
}

impl LastingState {
    /// A worker whose circuit breaker waits for that has taken a new connection and answered a health check, which
    /// began at `asked_at`.
    pub fn on_connected(&self, worker: &Worker, asked_at: Instant) {
        self.models.on_connected(worker, asked_at);
    }

    /// Forgets the pinned blocks of a worker whose engine has restarted.
    pub fn forget_pinned(&self, worker: WorkerId) {
        if let Some(pinned) = &self.pinned {
            pinned.forget(worker);
        }
    }

    /// Forgets workers and models that left the fleet, and removes their metric series.
    pub fn forget_departed(&self, fleet: &Snapshot) {
        if let Some(pinned) = &self.pinned {
            let workers = fleet.workers.iter();
            let listed: FxHashSet<WorkerId> = workers.map(|status| status.worker.id).collect();
            pinned.retain(|worker| listed.contains(&worker));
        }
        let is_configured = |model: &str| self.queues.is_known(model);
        self.models
            .forget_departed(observe::now(), fleet, is_configured, &self.usage);
        self.queues.remove_gone(fleet);
    }
}
