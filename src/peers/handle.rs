//! The handle by which the other parts reach what replicas share.

use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use std::{fmt, io};

use tokio::net::TcpListener;
use tracing::{debug, warn};

use super::discovery;
use super::handshake::{Identity, InstanceId, Refusal};
use super::link::{Failure, Link};
use super::metrics::Metrics;
use super::routed::RoutedPrompts;
use super::said::Level;
use super::server::{self, Accept, Call};
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
pub struct Peers(Option<Arc<Shared>>);

#[derive(Debug)]
struct Shared {
    state: Arc<State>,
    trees: OnceLock<TreeHandler>,
    /// Until when other replicas are expected though no address is known yet; `None` if none are listed.
    expected_until: Option<Instant>,
}

/// A DNS name that has not been resolved by then is not waited for.
const FIRST_LOOK: Duration = Duration::from_secs(2);

/// Serves the call by which a replica that starts copies trees, until it ends.
#[derive(Clone)]
pub struct TreeHandler(Arc<dyn Fn(Link) -> Serving + Send + Sync>);

/// A call that is being served.
pub type Serving = Pin<Box<dyn Future<Output = ()> + Send>>;

impl fmt::Debug for TreeHandler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TreeHandler").finish_non_exhaustive()
    }
}

impl TreeHandler {
    pub fn new(serve: impl Fn(Link) -> Serving + Send + Sync + 'static) -> Self {
        Self(Arc::new(serve))
    }
}

impl Peers {
    /// For a router that is the only one.
    pub fn off(registry: &metrics::Registry) -> Self {
        // The same metrics on each router.
        let _ = Metrics::new(registry);
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
        let metrics = Metrics::new(registry);
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
            trees: OnceLock::new(),
            expected_until: is_listed.then(|| observe::now() + FIRST_LOOK),
        }))))
    }

    /// Accepts and connects other replicas until the drain of `tasks`, which should come last: a draining replica
    /// reports until its last request has ended.
    pub async fn run(self, settings: Settings, listener: TcpListener, tasks: Tasks) {
        let Some(shared) = self.0 else { return };
        let state = &shared.state;
        let accept = Arc::new(Acceptor {
            shared: shared.clone(),
            tasks: tasks.clone(),
        });
        tasks.spawn(server::run(
            listener,
            state.identity.clone(),
            state.tls.clone(),
            settings.advanced,
            accept,
            tasks.clone(),
        ));
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
            let _ = shared.trees.set(handler);
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

#[derive(Debug)]
struct Acceptor {
    shared: Arc<Shared>,
    tasks: Tasks,
}

impl Accept for Acceptor {
    async fn serve(self: Arc<Self>, call: Call, link: Link, from: IpAddr) {
        match call {
            Call::Sync => {
                let port = link.peer.port;
                let address = (port != 0).then(|| SocketAddr::new(from, port).to_string().into());
                let state = self.shared.state.clone();
                session::run(state, link, address, self.tasks.clone()).await;
            }
            Call::CopyTrees => match self.shared.trees.get() {
                Some(TreeHandler(serve)) => serve(link).await,
                None => {
                    let status = tonic::Status::unimplemented("this replica serves no trees");
                    link.refuse(status).await;
                }
            },
        }
    }

    fn on_failure(&self, from: IpAddr, failure: &Failure) {
        let reason = match failure {
            Failure::Refused(Refusal::Secret) => "secret",
            Failure::Refused(Refusal::Version(_)) => "version",
            Failure::Refused(Refusal::Malformed(_)) => "malformed",
            // An address of this replica is among those listed.
            Failure::Refused(Refusal::Itself) => return,
            Failure::NotAllowed(_) => "loopback",
            Failure::Lost(_) | Failure::NotListening | Failure::RefusedByPeer(_) => "handshake",
        };
        let metrics = &self.shared.state.metrics;
        metrics.refused.with_label_values(&[reason]).inc();
        match failure {
            Failure::Refused(Refusal::Secret | Refusal::Version(_)) | Failure::NotAllowed(_) => {
                // Once: it tries again every few seconds.
                let from = from.to_string().into();
                let state = &self.shared.state;
                if state.says_address(observe::now(), &from, Level::Lost) {
                    warn!(%from, reason = %failure, "replica refused");
                }
            }
            _ => debug!(%from, reason = %failure, "replica's handshake failed"),
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
