//! A fleet of pretend engines and a router in front of it, all in this process and on real sockets.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZeroU32;
use std::time::Duration;

use tokio::net::TcpListener;

use crate::app::App;
use crate::config::{self, Config};
use crate::fleet::Role;
use crate::fleet::discovery::Listed;
use crate::fleet::handoff::Connector;
use crate::http::drain::Tasks;
use crate::relay::prefill_decode;
use crate::routing::{self, Policy};
use crate::sim::worker;

pub(super) const MODEL: &str = "sim";

/// Engines in the same process answer their first probe within milliseconds.
const READY_LIMIT: Duration = Duration::from_secs(10);
/// Nobody's answers are lost at the end of a demo.
const DRAIN_TIMEOUT_MS: u64 = 1_000;

#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
pub(super) struct Settings {
    /// Pretend engines.
    #[arg(long, value_name = "ENGINES", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(super) workers: u32,

    /// Speed at which an engine computes prompts, in tokens a second.
    #[arg(long, value_name = "TOKENS", default_value_t = number(16_000))]
    pub(super) prefill_tokens_per_second: NonZeroU32,

    /// Time for one token of every running answer, in milliseconds.
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 10)]
    pub(super) decode_ms: u64,

    /// Size of an engine's prefix cache, in blocks of 16 tokens; 8,192 with --disaggregated, where half the
    /// engines hold all that is answered.
    #[arg(
        long,
        value_name = "BLOCKS",
        default_value_t = number(2_048),
        default_value_if("disaggregated", "true", "8192"),
    )]
    pub(super) cache_blocks: NonZeroU32,
}

const fn number(value: u32) -> NonZeroU32 {
    NonZeroU32::new(value).expect("the defaults are not zero")
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

/// Who does what.
#[derive(Clone, Copy, Debug)]
pub(super) enum Cast {
    /// Each engine computes prompts and answers.
    Combined(Policy),
    /// The first half of the engines computes prompts, the others answer them.
    Split,
}

impl Cast {
    /// How the engine at this place is called, and what it does.
    fn part(self, place: u32, engines: u32) -> (String, Role) {
        let prefill = engines / 2;
        match self {
            Self::Combined(_) => (format!("engine-{}", place + 1), Role::Both),
            Self::Split if place < prefill => (format!("prefill-{}", place + 1), Role::Prefill),
            Self::Split => (format!("decode-{}", place + 1 - prefill), Role::Decode),
        }
    }

    fn policy(self) -> Policy {
        match self {
            Self::Combined(policy) => policy,
            Self::Split => Policy::CacheAware,
        }
    }

    fn splits(self) -> prefill_decode::Settings {
        prefill_decode::Settings {
            connector: match self {
                Self::Combined(_) => None,
                Self::Split => Some(Connector::Nixl),
            },
            ..prefill_decode::Settings::default()
        }
    }
}

/// Where the router listens.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ports {
    Free,
    /// Those of the default configuration, or free ones if somebody has them.
    Usual,
}

#[derive(Debug)]
pub(super) struct Stage {
    router: App,
    engines: Vec<worker::Handle>,
    tasks: Tasks,
}

impl Stage {
    /// Starts everything. Caches are empty, and every engine takes requests when this returns.
    pub(super) async fn start(settings: &Settings, cast: Cast, ports: Ports) -> io::Result<Self> {
        let tasks = Tasks::default();
        let mut engines = Vec::new();
        let mut workers = Vec::new();
        for place in 0..settings.workers {
            let (name, role) = cast.part(place, settings.workers);
            let engine = worker::bind(worker::Settings {
                handoff: handoff(role),
                ..settings.engine()
            })
            .await?;
            workers.push(Listed {
                url: format!("http://{}", engine.addr()),
                name,
                role,
                ..Listed::default()
            });
            engines.push(engine.handle());
            tasks.spawn(engine.run(tasks.stopped()));
        }
        let config = Config {
            api: config::Api {
                drain_timeout_ms: DRAIN_TIMEOUT_MS,
                ..config::Api::default()
            },
            fleet: config::Fleet {
                workers,
                ..config::Fleet::default()
            },
            routing: routing::Settings {
                policy: cast.policy(),
                ..routing::Settings::default()
            },
            prefill_decode: cast.splits(),
            ..Config::default()
        };
        let api = listen(8080, ports).await?;
        let admin = listen(9090, ports).await?;
        let stage = Self {
            router: App::start(&config, api, admin)?,
            engines,
            tasks,
        };
        stage.ready().await?;
        Ok(stage)
    }

    pub(super) fn router(&self) -> &App {
        &self.router
    }

    /// Answers that each engine has given. Not its requests, among which are the router's probes.
    pub(super) fn requests_per_worker(&self) -> Vec<u64> {
        let engines = self.engines.iter();
        engines.map(|engine| engine.counters().finished).collect()
    }

    /// Prompts that one engine answered and another had computed.
    pub(super) fn handed_over(&self) -> u64 {
        let engines = self.engines.iter();
        engines.map(|engine| engine.handoffs().received).sum()
    }

    pub(super) async fn stop(self) {
        self.router.drain().await;
        self.tasks
            .drain(Duration::from_millis(DRAIN_TIMEOUT_MS))
            .await;
    }

    async fn ready(&self) -> io::Result<()> {
        let fleet = self.router.fleet();
        let mut changes = fleet.changes();
        let all_take_requests = async {
            let count = || {
                let snapshot = fleet.snapshot();
                snapshot
                    .models
                    .get(MODEL)
                    .map_or(0, |group| group.workers.len())
            };
            while count() < self.engines.len() {
                // The registry lives as long as the router does, so this cannot fail.
                let _ = changes.changed().await;
            }
        };
        tokio::time::timeout(READY_LIMIT, all_take_requests)
            .await
            .map_err(|_| {
                let limit = READY_LIMIT.as_secs();
                io::Error::other(format!(
                    "the router did not find all its engines within {limit} s"
                ))
            })
    }
}

fn handoff(role: Role) -> worker::HandoffSettings {
    let role = match role {
        Role::Both => return worker::HandoffSettings::default(),
        Role::Prefill => worker::Role::Prefill,
        Role::Decode => worker::Role::Decode,
    };
    worker::HandoffSettings {
        role: Some(role),
        connector: Some(worker::Connector::Nixl),
        ..worker::HandoffSettings::default()
    }
}

async fn listen(usual: u16, ports: Ports) -> io::Result<TcpListener> {
    let bind = |port: u16| TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    match ports {
        Ports::Free => bind(0).await,
        Ports::Usual => match bind(usual).await {
            Ok(listener) => Ok(listener),
            Err(_) => bind(0).await,
        },
    }
}
