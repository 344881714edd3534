//! The handle by which the other parts reach what replicas share.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::TcpListener;

use super::discovery;
use super::handshake::{Identity, InstanceId};
use super::link::{Failure, Link};
use super::metrics::Metrics;
use super::routed::RoutedPrompts;
use super::server::Server;
use super::session;
use super::settings::Settings;
use super::state::{State, TreeHandler, TreeSources};
use super::status::{LoadRow, Status};
use super::{client, wire};
use crate::fleet::registry::Registry;
use crate::http::drain::Tasks;
use crate::http::tls;
use crate::observe;
use crate::observe::metrics;

/// What this replica shares with others. Without other replicas it exists too, and does nothing.
#[derive(Clone, Debug, Default)]
pub struct Peers(Option<Arc<Shared>>);

#[derive(Debug)]
struct Shared {
    state: Arc<State>,
    /// Until when other replicas are expected though no address is known yet; `None` if none are listed.
    expected_until: Option<Instant>,
}

/// A DNS name that has not been resolved by then is not waited for.
const FIRST_LOOK: Duration = Duration::from_secs(2);

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
        let advanced = settings.advanced.clone();
        let state = State::new(
            observe::now(),
            identity,
            tls,
            advanced,
            fleet,
            routed,
            metrics,
        );
        let scraped = state.clone();
        registry.on_scrape(move || scraped.update_metrics(observe::now()));
        let is_listed = !settings.discovery.is_empty();
        Ok(Self(Some(Arc::new(Shared {
            state,
            expected_until: is_listed.then(|| observe::now() + FIRST_LOOK),
        }))))
    }

    /// Accepts and connects other replicas until the drain of `tasks`, which should come last: a draining replica
    /// reports until its last request has ended.
    pub async fn run(self, settings: Settings, listener: TcpListener, tasks: Tasks) {
        let Some(shared) = self.0 else { return };
        let state = &shared.state;
        let server = Server {
            state: state.clone(),
            tasks: tasks.clone(),
        };
        tasks.spawn(server.run(listener));
        tasks.spawn_until_stopped(session::report(state.clone()));
        discovery::follow(state.clone(), settings.discovery, tasks.clone()).await;
    }

    /// True while other replicas are expected and none is connected. One load of an atomic.
    pub fn is_alone(&self) -> bool {
        self.0
            .as_ref()
            .is_some_and(|shared| shared.state.is_alone())
    }

    /// Other replicas that are connected and not silent. One load of an atomic.
    pub fn connected(&self) -> u32 {
        self.0.as_ref().map_or(0, |shared| shared.state.connected())
    }

    /// Whether there may be other replicas.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Reports whether this replica takes requests.
    pub fn set_ready(&self, is_ready: bool) {
        if let Some(shared) = &self.0 {
            shared.state.set_ready(is_ready);
        }
    }

    /// Reports that this replica takes no new requests.
    pub fn set_draining(&self) {
        if let Some(shared) = &self.0 {
            shared.state.set_draining();
        }
    }

    /// The replicas that could be asked for their trees now or soon.
    pub fn tree_sources(&self) -> TreeSources {
        let Some(shared) = &self.0 else {
            return TreeSources::default();
        };
        let now = observe::now();
        let is_early = shared.expected_until.is_some_and(|until| now < until);
        // Asked first: an address that comes meanwhile is seen below.
        let is_unlooked = is_early && !shared.state.has_addresses();
        let mut sources = shared.state.tree_sources(now);
        sources.may_grow |= is_unlooked;
        sources
    }

    /// Calls another replica for its trees.
    pub async fn call_for_trees(&self, address: &str) -> Result<Link, Failure> {
        let Some(shared) = &self.0 else {
            return Err(Failure::NotListening);
        };
        let state = &shared.state;
        let call = wire::COPY_TREES;
        client::connect(
            address,
            call,
            &state.identity,
            state.tls.as_deref(),
            &state.settings,
        )
        .await
    }

    /// Serves other replicas' calls for trees. The first handler stays.
    pub fn serve_trees(&self, handler: TreeHandler) {
        if let Some(shared) = &self.0 {
            let _ = shared.state.trees.set(handler);
        }
    }

    /// For `/fleet`; `None` without other replicas.
    pub fn status(&self, now: Instant) -> Option<Status> {
        let shared = self.0.as_ref()?;
        Some(shared.state.status(now))
    }

    /// What each other replica has at a worker.
    pub fn loads(&self, address: &str) -> Vec<LoadRow> {
        let shared = self.0.as_ref();
        shared.map_or_else(Vec::new, |shared| shared.state.loads(address))
    }
}

fn host_name() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    let name = name.trim();
    (!name.is_empty()).then(|| name.to_owned())
}

#[cfg(test)]
pub(super) mod tests;
