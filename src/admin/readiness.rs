//! Whether this router should be sent requests, for `/readyz` here and `/health` on the API's port.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use super::config::ConfigStatus;
use crate::fleet::registry::Registry;
use crate::http::drain::Tasks;
use crate::peers::warm_start::{WarmStartStatus, Warmth};
use crate::relay::Queues;
use crate::store::{self, ResponseStore};

const STORE_UNAVAILABLE: &str = "response store unavailable";
const WAITS_FOR_WORKERS: &str =
    "no healthy worker; requests wait for one (queue.no_worker_timeout)";

#[derive(Debug)]
pub struct Readiness {
    pub(crate) fleet: Arc<Registry>,
    /// Where requests may wait for the first worker: without requests nobody would start it.
    pub(crate) queues: Arc<Queues>,
    /// The store of responses. What is wrong with its settings is part of the answers.
    pub(crate) store: Arc<dyn ResponseStore>,
    /// A router without the store is not ready.
    pub(crate) needs_store: bool,
    pub(crate) tasks: Tasks,
    /// Whether other replicas' knowledge is still being taken over.
    pub(crate) start: Arc<WarmStartStatus>,
    /// Whether the configuration's file is what runs.
    pub(crate) config: ConfigStatus,
    /// The router still takes requests, but wants no more of them.
    pub(crate) is_draining: AtomicBool,
    pub(crate) was_asked: AtomicBool,
}

impl Readiness {
    /// What operators should know of a router that is ready: that it started cold, that its requests wait for a worker, what
    /// may lose responses, or that its configuration's file is refused.
    pub fn detail(&self) -> Option<String> {
        let warmth = Some(self.start.get()).filter(|warmth| warmth.is_cold());
        let waits_for_workers = (!self.has_workers()).then(|| WAITS_FOR_WORKERS.to_owned());
        let details: Vec<String> = warmth
            .map(|warmth| warmth.to_string())
            .into_iter()
            .chain(waits_for_workers)
            .chain(self.store_warning())
            .chain(self.config.problem())
            .collect();
        (!details.is_empty()).then(|| details.join("; "))
    }

    /// What operators should know of what is missing.
    pub fn detail_of(&self, missing: &str) -> Option<String> {
        self.store_warning()
            .filter(|_| missing == STORE_UNAVAILABLE)
    }

    fn store_warning(&self) -> Option<String> {
        let warning = self.store.health().warning;
        (!warning.is_empty()).then_some(warning)
    }

    /// Whether some worker can take requests. A router without one may be ready, but knows of no cache.
    pub fn has_workers(&self) -> bool {
        self.fleet.snapshot().is_ready()
    }

    /// From now on the router is not ready.
    pub fn begin_drain(&self) {
        self.is_draining.store(true, Relaxed);
    }

    /// Whether clients should take their next request elsewhere.
    pub fn is_draining(&self) -> bool {
        self.is_draining.load(Relaxed) || self.tasks.is_stopping()
    }

    /// True once somebody has asked: a load balancer may wait for an answer that says no.
    pub fn was_asked(&self) -> bool {
        self.was_asked.load(Relaxed)
    }

    /// Checks it now. An error names what is missing.
    pub async fn check(&self) -> Result<(), &'static str> {
        self.was_asked.store(true, Relaxed);
        if self.is_draining() {
            return Err("draining");
        }
        if !self.has_workers() && !self.queues.wait_for_workers() {
            return Err("no healthy worker");
        }
        if self.start.get() == Warmth::Warming {
            return Err("warming up: taking over what other replicas know of the workers' caches");
        }
        if !self.needs_store {
            return Ok(());
        }
        // Asks the store: a store without requests would not be known to be down.
        match self.store.admit().await {
            Ok(()) => Ok(()),
            Err(store::Error::Full { .. }) => Err("response store full"),
            Err(_) => Err(STORE_UNAVAILABLE),
        }
    }
}
