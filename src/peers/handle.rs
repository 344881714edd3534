//! The handle by which the other parts reach what replicas share.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use tokio::net::TcpListener;

use super::discovery;
use super::handshake::{Identity, InstanceId};
use super::link::{Failure, Link, TreeHandler};
use super::metrics::Metrics;
use super::routed::RoutedPrompts;
use super::server::Server;
use super::session;
use super::settings::Settings;
use super::state::{State, TreeSources};
use super::status::{LoadRow, Status};
use super::{client, wire};
use crate::fleet::registry::Registry;
use crate::http::drain::Tasks;
use crate::http::tls;
use crate::observe;
use crate::observe::metrics;

/// What this replica shares with others. Without other replicas it exists too, and does nothing.
#[derive(Clone, Debug, Default)]
pub struct Peers(Option<Arc<State>>);

impl Peers {
    /// For a router that is the only one.
    pub fn off(registry: &metrics::Registry) -> Self {
        // The same metrics on each router.
        let _ = Metrics::register(registry);
        Self(None)
    }

    /// For a replica that listens at `listen`. Nothing is shared before [`Peers::run`].
    pub fn new(
        settings: &Settings,
        listen: SocketAddr,
        tls: Option<Arc<tls::Server>>,
        fleet: Arc<Registry>,
        routed: Arc<RoutedPrompts>,
        registry: &metrics::Registry,
    ) -> io::Result<Self> {
        let mut random = [0; 16];
        getrandom::fill(&mut random).map_err(io::Error::other)?;
        let name = match settings.name.as_str() {
            // Replicas on one host differ in the port.
            "" => host_name().map_or_else(
                || listen.to_string(),
                |host| format!("{host}:{}", listen.port()),
            ),
            name => name.to_owned(),
        };
        let identity = Identity {
            id: InstanceId::new(u128::from_be_bytes(random)),
            name: name.into(),
            release: env!("CARGO_PKG_VERSION").into(),
            port: listen.port(),
            secret: settings.secret.clone(),
        };
        let metrics = Metrics::register(registry);
        let now = observe::now();
        let state = State::new(now, identity, tls, settings, fleet, routed, metrics);
        let scraped = state.clone();
        registry.on_scrape(move || scraped.update_metrics(observe::now()));
        Ok(Self(Some(state)))
    }

    /// Accepts and connects other replicas until the drain of `tasks`, which should come last: a draining replica
    /// reports until its last request has ended.
    pub async fn run(self, settings: Settings, listener: TcpListener, tasks: Tasks) {
        let Some(state) = self.0 else { return };
        let server = Server {
            state: state.clone(),
            tasks: tasks.clone(),
        };
        let supervisor = tasks.supervisor();
        tasks.spawn(supervisor.essential("peer_listener", server.run(listener)));
        let reporting = supervisor.restarts("peer_reports", state.clone(), session::report);
        tasks.spawn_until_stopped(reporting);
        discovery::follow(state, settings.discovery, tasks).await;
    }

    /// True while other replicas are expected and none is connected. One load of an atomic.
    pub fn is_alone(&self) -> bool {
        self.0.as_ref().is_some_and(|state| state.is_alone())
    }

    /// Other replicas that are connected and not silent. One load of an atomic.
    pub fn connected(&self) -> u32 {
        self.0.as_ref().map_or(0, |state| state.connected())
    }

    /// Whether there may be other replicas.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Reports whether this replica takes requests.
    pub fn set_ready(&self, is_ready: bool) {
        if let Some(state) = &self.0 {
            state.set_ready(is_ready);
        }
    }

    /// Reports that this replica takes no new requests.
    pub fn set_draining(&self) {
        if let Some(state) = &self.0 {
            state.set_draining();
        }
    }

    /// The replicas that could be asked for their trees now or soon.
    pub fn tree_sources(&self) -> TreeSources {
        let state = self.0.as_ref();
        state.map_or_else(TreeSources::default, |state| {
            state.tree_sources(observe::now())
        })
    }

    pub async fn call_for_trees(&self, address: &str) -> Result<Link, Failure> {
        let Some(state) = &self.0 else {
            return Err(Failure::NotListening);
        };
        client::connect(
            address,
            wire::COPY_TREES,
            &state.identity,
            state.tls.as_deref(),
            &state.settings,
        )
        .await
    }

    /// Serves other replicas' calls for trees. The first handler stays.
    pub fn serve_trees(&self, handler: TreeHandler) {
        if let Some(state) = &self.0 {
            let _ = state.trees.set(handler);
        }
    }

    /// For `/fleet`; `None` without other replicas.
    pub fn status(&self, now: Instant) -> Option<Status> {
        Some(self.0.as_ref()?.status(now))
    }

    /// What each other replica has at a worker.
    pub fn loads(&self, address: &str) -> Vec<LoadRow> {
        let state = self.0.as_ref();
        state.map_or_else(Vec::new, |state| state.loads(address))
    }
}

fn host_name() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    let name = name.trim();
    (!name.is_empty()).then(|| name.to_owned())
}

#[cfg(test)]
pub(super) mod tests;
