//! Whether this router should be sent requests, for `/readyz` here and `/health` on the API's port.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use super::config::ConfigStatus;
use crate::http::drain::Tasks;
use crate::peers::warm_start::{WarmStartStatus, Warmth};
use crate::relay::Relay;
use crate::store::{self, ResponseStore};

const STORE_UNAVAILABLE: &str = "response store unavailable";

/// What readiness depends on.
pub struct Readiness {
    relay: Arc<Relay>,
    /// The store of responses, if a router without it is not ready.
    store: Option<Arc<dyn ResponseStore>>,
    tasks: Tasks,
    /// Whether other replicas' knowledge is still being taken over.
    start: Arc<WarmStartStatus>,
    /// Whether the configuration's file is what runs.
    config: ConfigStatus,
    /// The router still takes requests, but wants no more of them.
    is_draining: AtomicBool,
    /// Somebody has asked.
    was_asked: AtomicBool,
    /// The store whose warning is part of the answer, whether the store is required or not.
    warns_of: Option<Arc<dyn ResponseStore>>,
}

impl fmt::Debug for Readiness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Readiness").finish_non_exhaustive()
    }
}

impl Readiness {
    pub fn new(
        relay: Arc<Relay>,
        store: Option<Arc<dyn ResponseStore>>,
        tasks: Tasks,
        start: Arc<WarmStartStatus>,
    ) -> Self {
        Self {
            relay,
            store,
            tasks,
            start,
            config: ConfigStatus::default(),
            is_draining: AtomicBool::new(false),
            was_asked: AtomicBool::new(false),
            warns_of: None,
        }
    }

    /// Adds what is wrong with the settings of this store to the answers.
    pub fn warning_of(mut self, store: Arc<dyn ResponseStore>) -> Self {
        self.warns_of = Some(store);
        self
    }

    /// Adds that the configuration's file is refused to the answers.
    pub fn with_config(mut self, config: ConfigStatus) -> Self {
        self.config = config;
        self
    }

    /// What operators should know of a router that is ready: that it started cold, what may lose responses, or that its
    /// configuration's file is refused.
    pub fn detail(&self) -> Option<String> {
        let warmth = Some(self.start.get()).filter(|warmth| warmth.is_cold());
        let warning = self.warns_of.as_ref().map(|store| store.health().warning);
        let warning = warning.filter(|warning| !warning.is_empty());
        let details: Vec<String> = warmth
            .map(|warmth| warmth.to_string())
            .into_iter()
            .chain(warning)
            .chain(self.config.problem())
            .collect();
        (!details.is_empty()).then(|| details.join("; "))
    }

    /// What operators should know of what is missing.
    pub fn detail_of(&self, missing: &str) -> Option<String> {
        let store = self.store.as_ref().filter(|_| missing == STORE_UNAVAILABLE);
        store
            .map(|store| store.health().warning)
            .filter(|warning| !warning.is_empty())
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
        if !self.relay.fleet().snapshot().is_ready() {
            return Err("no healthy worker");
        }
        if self.start.get() == Warmth::Warming {
            return Err("warming up: taking over what other replicas know of the workers' caches");
        }
        // Asks the store: a store without requests would not be known to be down.
        match &self.store {
            Some(store) => match store.admit().await {
                Ok(()) => Ok(()),
                Err(store::Error::Full { .. }) => Err("response store full"),
                Err(_) => Err(STORE_UNAVAILABLE),
            },
            None => Ok(()),
        }
    }
}
