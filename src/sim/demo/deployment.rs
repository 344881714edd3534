//! A fleet of simulated engines and the routers in front of it, in this process and on real sockets.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZeroU32;
use std::time::Duration;

use tokio::net::TcpListener;

use crate::app::App;
use crate::config::{self, Config};
use crate::fleet::Role;
use crate::fleet::discovery::WorkerSpec;
use crate::fleet::kv_transfer::Connector;
use crate::http::drain::Tasks;
use crate::peers::settings::PeerDiscovery;
use crate::relay::prefill_decode;
use crate::routing::{self, Policy};
use crate::sim::worker;
use crate::units::parse_milliseconds;

pub(super) const MODEL: &str = "sim";

/// Engines in the same process answer their first health check within milliseconds.
const READY_TIMEOUT: Duration = Duration::from_secs(10);
const PEERS_LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// Short, because no request is running when a deployment is stopped.
const DRAIN_TIMEOUT_MS: u64 = 1_000;

#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
pub(super) struct Settings {
    /// Number of simulated engines.
    #[arg(long, value_name = "ENGINES", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(super) workers: u32,

    /// Prefill speed of an engine, in tokens per second.
    #[arg(long, value_name = "TOKENS", default_value = "16000")]
    pub(super) prefill_tokens_per_second: NonZeroU32,

    /// Duration of a step, which generates one token for every running request and computes prompts: without what its
    /// tokens take.
    #[arg(
        long = "decode-time",
        value_name = "DURATION",
        default_value = "10ms",
        value_parser = parse_milliseconds
    )]
    pub(super) decode_ms: u64,

    /// Size of an engine's prefix cache, in blocks of 16 tokens; 8,192 with --disaggregated, where the decode
    /// half of the fleet caches all conversations.
    #[arg(
        long,
        value_name = "BLOCKS",
        default_value = "2048",
        default_value_if("disaggregated", "true", "8192")
    )]
    pub(super) cache_blocks: NonZeroU32,
}

impl Settings {
    pub(super) fn engine(&self) -> worker::Settings {
        worker::Settings {
            models: vec![MODEL.to_owned()],
            prefill_tokens_per_second: self.prefill_tokens_per_second,
            decode_ms: self.decode_ms,
            cache_blocks: self.cache_blocks,
            ..worker::Settings::default()
        }
    }
}

/// The roles of the engines, and the policy that chooses among them.
#[derive(Clone, Copy, Debug)]
pub(super) enum Topology {
    /// Every engine computes prompts and generates answers.
    Combined(Policy),
    /// The first half of the engines are prefill engines, the others decode engines.
    Disaggregated,
}

impl Topology {
    /// The name and role of the engine with this index.
    fn worker(self, index: u32, engines: u32) -> (String, Role) {
        let prefill = engines / 2;
        match self {
            Self::Combined(_) => (format!("engine-{}", index + 1), Role::Both),
            Self::Disaggregated if index < prefill => {
                (format!("prefill-{}", index + 1), Role::Prefill)
            }
            Self::Disaggregated => (format!("decode-{}", index + 1 - prefill), Role::Decode),
        }
    }

    fn policy(self) -> Policy {
        match self {
            Self::Combined(policy) => policy,
            Self::Disaggregated => Policy::CacheAware,
        }
    }

    fn prefill_decode(self) -> prefill_decode::Settings {
        prefill_decode::Settings {
            connector: match self {
                Self::Combined(_) => None,
                Self::Disaggregated => Some(Connector::Nixl),
            },
            ..prefill_decode::Settings::default()
        }
    }
}

/// The routers in front of a fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Routers {
    One,
    /// So many routers that share what they know.
    Sharing(u32),
    /// So many routers that do not know of each other.
    Apart(u32),
}

impl Routers {
    fn count(self) -> u32 {
        match self {
            Self::One => 1,
            Self::Sharing(count) | Self::Apart(count) => count,
        }
    }
}

/// The ports that the first router listens on.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ports {
    Ephemeral,
    /// The ports of the default configuration, or ephemeral ones where they are in use.
    Default,
}

#[derive(Debug)]
pub(super) struct Deployment {
    routers: Vec<App>,
    sharing: Routers,
    /// The configuration of the routers, but for what each has of its own.
    config: Config,
    engines: Engines,
}

/// Simulated engines that run.
#[derive(Debug)]
struct Engines {
    handles: Vec<worker::Handle>,
    addresses: Vec<String>,
    tasks: Tasks,
}

impl Engines {
    async fn start(settings: &Settings, topology: Topology) -> io::Result<(Self, Vec<WorkerSpec>)> {
        let mut engines = Self {
            handles: Vec::new(),
            addresses: Vec::new(),
            tasks: Tasks::default(),
        };
        let mut workers = Vec::new();
        for index in 0..settings.workers {
            let (name, role) = topology.worker(index, settings.workers);
            let engine = worker::bind(worker::Settings {
                transfer: kv_transfer(role),
                ..settings.engine()
            })
            .await?;
            let address = engine.addr().to_string();
            workers.push(WorkerSpec {
                url: format!("http://{address}"),
                name,
                role: Some(role),
                ..WorkerSpec::default()
            });
            engines.addresses.push(address);
            engines.handles.push(engine.handle());
            engines.tasks.spawn(engine.run(engines.tasks.stopped()));
        }
        Ok((engines, workers))
    }

    async fn stop(&self) {
        let timeout = Duration::from_millis(DRAIN_TIMEOUT_MS);
        self.tasks.drain(timeout).await;
    }
}

impl Deployment {
    /// Starts engines with empty caches and routers, and waits until each router has found every engine, and the other
    /// routers if they share.
    pub(super) async fn start(
        settings: &Settings,
        topology: Topology,
        routers: Routers,
        ports: Ports,
    ) -> io::Result<Self> {
        let (engines, workers) = Engines::start(settings, topology).await?;
        let mut config = Config {
            api: config::Api {
                drain_timeout: Duration::from_millis(DRAIN_TIMEOUT_MS),
                ..config::Api::default()
            },
            workers,
            routing: routing::Settings {
                policy: topology.policy(),
                ..routing::Settings::default()
            },
            prefill_decode: topology.prefill_decode(),
            ..Config::default()
        };
        let mut deployment = Self {
            routers: Vec::new(),
            sharing: routers,
            config: config.clone(),
            engines,
        };
        let mut others = Vec::new();
        for index in 0..routers.count() {
            let ports = if index == 0 { ports } else { Ports::Ephemeral };
            let api = listen(8080, ports).await?;
            let admin = listen(9090, ports).await?;
            let mut peers = None;
            if matches!(routers, Routers::Sharing(_)) {
                let listener = listen(0, Ports::Ephemeral).await?;
                let address = listener.local_addr()?.to_string();
                config.peers.listen = address.clone();
                // Replicas accept each other, so each need know only those before it.
                config.peers.discovery = vec![PeerDiscovery::Static(others.clone())];
                others.push(address);
                peers = Some(listener);
            }
            let router = App::start_with_peers(&config, api, admin, peers)?;
            deployment.routers.push(router);
        }
        deployment.ready().await?;
        Ok(deployment)
    }

    /// Gives the router fresh engines in place of those that it has, and another policy. What it has counted stays.
    pub(super) async fn replace_engines(
        &mut self,
        settings: &Settings,
        policy: Policy,
    ) -> io::Result<()> {
        let (engines, workers) = Engines::start(settings, Topology::Combined(policy)).await?;
        self.config.workers = workers;
        self.config.routing.policy = policy;
        let before = std::mem::replace(&mut self.engines, engines);
        for router in &self.routers {
            router.replace_config(self.config.clone()).await?;
        }
        before.stop().await;
        self.ready().await
    }

    pub(super) fn routers(&self) -> &[App] {
        &self.routers
    }

    /// The one that the default ports belong to.
    pub(super) fn router(&self) -> &App {
        &self.routers[0]
    }

    /// Generation requests that each engine has finished; health checks and metrics are not among them.
    pub(super) fn requests_per_worker(&self) -> Vec<u64> {
        let engines = self.engines.handles.iter();
        engines.map(|engine| engine.counters().finished).collect()
    }

    /// Prompts that a prefill engine computed and a decode engine received.
    pub(super) fn kv_transfers(&self) -> u64 {
        let engines = self.engines.handles.iter();
        engines.map(|engine| engine.kv_transfers().received).sum()
    }

    pub(super) async fn stop(self) {
        for router in &self.routers {
            router.drain().await;
        }
        self.engines.stop().await;
    }

    async fn ready(&self) -> io::Result<()> {
        let all_found = async {
            for router in &self.routers {
                self.found_by(router).await;
            }
        };
        tokio::time::timeout(READY_TIMEOUT, all_found)
            .await
            .map_err(|_| {
                let message = format!(
                    "a router did not find all simulated engines and replicas within {READY_TIMEOUT:?}"
                );
                io::Error::other(message)
            })
    }

    async fn found_by(&self, router: &App) {
        let fleet = router.fleet();
        let mut changes = fleet.changes();
        let addresses = &self.engines.addresses;
        let count = || {
            let snapshot = fleet.snapshot();
            let workers = snapshot.models.get(MODEL).into_iter();
            let workers = workers.flat_map(|group| &group.workers);
            let is_fresh = |address: &str| addresses.iter().any(|fresh| fresh == address);
            let fresh = workers.filter(|worker| is_fresh(worker.pool.address()));
            fresh.count()
        };
        while count() < addresses.len() {
            // The registry lives as long as the router does, so this cannot fail.
            let _ = changes.changed().await;
        }
        let peers = match self.sharing {
            Routers::Sharing(count) => count as usize - 1,
            Routers::One | Routers::Apart(_) => 0,
        };
        while router.connected_peers() < peers {
            tokio::time::sleep(PEERS_LOOK_INTERVAL).await;
        }
    }
}

fn kv_transfer(role: Role) -> worker::TransferSettings {
    let is_leg = role != Role::Both;
    worker::TransferSettings {
        role: is_leg.then_some(role),
        connector: is_leg.then_some(worker::Connector::Nixl),
        ..worker::TransferSettings::default()
    }
}

async fn listen(default: u16, ports: Ports) -> io::Result<TcpListener> {
    let bind = |port: u16| TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    match ports {
        Ports::Ephemeral => bind(0).await,
        Ports::Default => match bind(default).await {
            Ok(listener) => Ok(listener),
            Err(_) => bind(0).await,
        },
    }
}
