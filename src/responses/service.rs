//! What the endpoints share: store, relay, keys, tasks, metrics. Each endpoint adds its own methods.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Weak};

use arc_swap::ArcSwap;
use serde::Serialize;

use super::background::{self, Background};
use super::metrics::Metrics;
use super::settings::{Mode, Settings};
use super::websocket;
use crate::http::drain::Tasks;
use crate::http::io_threads::{IoThreads, OffloadThread};
use crate::observe::metrics::Registry;
use crate::openai::body_budget::BodyMemory;
use crate::relay::Relay;
use crate::state_token::KeyRing;
use crate::store::ResponseStore;

/// The endpoints below `/v1/responses` and `/v1/conversations`, with the settings of one configuration. What outlives
/// it is shared with its [successor](Responses::successor).
#[derive(Debug)]
pub struct Responses {
    pub(super) settings: Settings,
    pub(super) store: Arc<dyn ResponseStore>,
    pub(super) relay: Arc<Relay>,
    pub(super) key_ring: Arc<KeyRing>,
    pub(super) tasks: Tasks,
    pub(super) io_threads: IoThreads,
    pub(super) metrics: Metrics,
    pub(super) background: Arc<Background>,
    /// Signs and verifies large state tokens. Each request has at most one job waiting here.
    pub(super) offload: Arc<OffloadThread>,
    /// For background runs that no request to this configuration's service starts.
    pub(super) latest: Arc<Latest>,
}

/// The service of the latest configuration.
pub(super) type Latest = ArcSwap<Weak<Responses>>;

/// For `GET /responses` on the admin listener.
#[derive(Debug, Serialize)]
pub struct Counts {
    mode: Mode,
    in_flight: i64,
    /// Responses since the start, by final status.
    finished: BTreeMap<&'static str, u64>,
    conversation_conflicts: u64,
    background: background::Counts,
}

impl Responses {
    #[expect(
        clippy::too_many_arguments,
        reason = "each is another part of the router, named once"
    )]
    pub fn new(
        settings: Settings,
        store: Arc<dyn ResponseStore>,
        relay: Arc<Relay>,
        key_ring: Arc<KeyRing>,
        bodies: Arc<BodyMemory>,
        tasks: Tasks,
        io_threads: IoThreads,
        registry: &Registry,
    ) -> io::Result<Arc<Self>> {
        let background = Background::new(
            settings.background.clone(),
            settings.store.lease.clone(),
            settings.store.retention.max_event_log,
            bodies,
            tasks.clone(),
            registry,
        );
        let responses = Arc::new(Self {
            settings,
            store,
            relay,
            key_ring,
            tasks,
            io_threads,
            metrics: Metrics::new(registry),
            background,
            offload: Arc::new(OffloadThread::start("state-tokens")?),
            latest: Arc::default(),
        });
        responses.latest.store(Arc::new(Arc::downgrade(&responses)));
        Ok(responses)
    }

    /// The endpoints of the next configuration. What a reload cannot change (the store, background runs) is as in this
    /// one. Bounds that both share stay until [`Responses::set_bounds`].
    pub fn successor(&self, settings: Settings, relay: Arc<Relay>) -> Arc<Self> {
        let successor = Arc::new(Self {
            settings,
            relay,
            store: self.store.clone(),
            key_ring: self.key_ring.clone(),
            tasks: self.tasks.clone(),
            io_threads: self.io_threads.clone(),
            metrics: self.metrics.clone(),
            background: self.background.clone(),
            offload: self.offload.clone(),
            latest: self.latest.clone(),
        });
        self.latest.store(Arc::new(Arc::downgrade(&successor)));
        successor
    }

    /// To be called when these endpoints begin to take requests: state tokens fit into their bodies, and how many background
    /// responses one tenant may run depends on whether there are tenants.
    pub fn set_bounds(&self, max_body: u64) {
        self.key_ring.set_max_body(max_body);
        let max = self.settings.background.max_running_per_tenant;
        self.background.set_max_per_tenant(max);
    }

    /// The memory that the bodies of all requests share.
    pub(crate) fn bodies(&self) -> &Arc<BodyMemory> {
        &self.background.bodies
    }

    pub(crate) fn websocket(&self) -> &websocket::Settings {
        &self.settings.websocket
    }

    pub fn mode(&self) -> Mode {
        self.settings.mode
    }

    pub fn counts(&self) -> Counts {
        let (in_flight, finished) = self.metrics.counts();
        Counts {
            mode: self.settings.mode,
            in_flight,
            finished: finished.into_iter().collect(),
            conversation_conflicts: self.metrics.conversation_conflicts.get(),
            background: self.background.counts(),
        }
    }
}
