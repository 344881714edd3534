//! Serves one engine's KV events, received over ZeroMQ, to any number of routers over gRPC: with a history
//! to resume from, snapshots for late subscribers, and an id for each engine incarnation, so that no
//! router continues from the events of a process that is gone.
//!
//! ```text
//! source -> follower (stream machine) -> feed: incarnation (history, cached blocks) -> service: calls
//! ```
//! Events are passed on unchanged: the routers decide which of them a tree can take.

pub mod cached_blocks;
pub mod feed;
pub mod follower;
pub mod history;
pub mod incarnation;
pub mod metrics;
pub mod service;
mod settings;
mod snapshot;

use std::io::{self, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tracing::{info, warn};

pub use self::settings::Settings;
use crate::http::drain::{Tasks, stop_signal};
use crate::http::io_threads::IoThreads;
use crate::http::{server, tls};
use crate::kv::source::Source;
use crate::kv::stream;
use crate::kv::zmq::{self, Zmq};
use crate::observe::metrics::Registry;

/// How long calls may take to end at shutdown.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Follows and serves until a stop signal.
pub async fn run(settings: Settings) -> io::Result<()> {
    let bridge = Bridge::bind(&settings).await?;
    writeln!(io::stdout(), "listening on {}", bridge.address())?;
    let failed = tokio::select! {
        stopped = stop_signal() => {
            stopped?;
            None
        }
        task = bridge.task_failed() => Some(task),
    };
    bridge.stop().await;
    match failed {
        Some(task) => {
            let message = format!("ended because its task `{task}` panicked");
            Err(io::Error::other(message))
        }
        None => Ok(()),
    }
}

/// A running bridge.
#[derive(Debug)]
pub struct Bridge {
    address: SocketAddr,
    feeds: Vec<Arc<feed::Feed>>,
    tasks: Tasks,
    /// They run the connections.
    _io_threads: IoThreads,
}

impl Bridge {
    /// Binds the listener, and follows the engine that the arguments name.
    pub async fn bind(settings: &Settings) -> io::Result<Self> {
        let targets = settings.targets().map_err(io::Error::other)?;
        let registry = Registry::default();
        let metrics = zmq::Metrics::new(&registry);
        let source = |target| Zmq::new(target, zmq::Settings::default(), metrics.clone());
        let sources = targets.into_iter().map(source).collect();
        Self::start(settings, sources, registry).await
    }

    /// Follows `sources`, one for each rank, and serves their events.
    pub async fn start<S: Source + 'static>(
        settings: &Settings,
        sources: Vec<S>,
        registry: Registry,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(settings.listen).await.map_err(|error| {
            io::Error::new(error.kind(), format!("{}: {error}", settings.listen))
        })?;
        let address = listener.local_addr()?;
        let metrics = metrics::Metrics::new(&registry);
        let tasks = Tasks::default();
        let supervisor = tasks.supervisor().clone();
        let io_threads = IoThreads::start(0)?;
        let limits = incarnation::Limits {
            history_batches: settings.history_batches_max,
            history_bytes: settings.history_bytes_max,
            state_bytes: settings.state_bytes_max,
        };
        let mut feeds = Vec::with_capacity(sources.len());
        for (rank, source) in (0..).zip(sources) {
            let feed = Arc::new(feed::Feed::new(rank, limits, metrics.clone()));
            feeds.push(feed.clone());
            let stream = stream::Settings {
                verify_interval: Duration::from_millis(settings.silence_ms),
                ..stream::Settings::default()
            };
            let following = follower::follow(source, stream, feed);
            tasks.spawn_until_stopped(supervisor.essential("follower", following));
        }
        let service = service::BridgeService::new(
            feeds.clone(),
            settings.subscribers_max,
            metrics,
            registry.clone(),
            tasks.clone(),
        );
        let connections = u32::try_from(settings.subscribers_max).unwrap_or(u32::MAX);
        // Some more, for health checks and metrics.
        let max_connections = connections.saturating_add(16);
        let tls_metrics = tls::Metrics::new(&registry);
        let of_bridge = settings.tls();
        let server = of_bridge.map(|settings| {
            tls::Server::new(
                tls::Listener::Bridge,
                &settings,
                max_connections,
                &tls_metrics,
            )
        });
        let server = server.transpose()?;
        if let Some(server) = &server {
            let watching = tls::watch(vec![server.clone()], Arc::default())?;
            tasks.spawn_until_stopped(supervisor.essential("tls_files", watching));
        }
        let serving = server::serve(
            listener,
            server::Settings {
                max_connections,
                send_timeout: Duration::from_millis(settings.send_timeout_ms),
                ..server::Settings::default()
            },
            server::Metrics::new(&registry),
            server::Handlers {
                handler: move |request, _| service.clone().answer(request),
                on_malformed: None,
                tls: server,
            },
            io_threads.clone(),
            tasks.clone(),
        );
        tasks.spawn(supervisor.essential("bridge", serving));
        Ok(Self {
            address,
            feeds,
            tasks,
            _io_threads: io_threads,
        })
    }

    /// The address of the listener.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Resolves with the name of a task that panicked and without which the bridge must not go on.
    async fn task_failed(&self) -> &'static str {
        self.tasks.supervisor().failed().await
    }

    /// Ends all calls and tasks.
    pub async fn stop(self) {
        self.tasks.stop();
        for feed in &self.feeds {
            feed.close("the bridge is shutting down");
        }
        match self.tasks.drain(DRAIN_TIMEOUT).await {
            0 => info!("stopped"),
            left => warn!(
                connections = left,
                "stopped; closed connections that did not end in time"
            ),
        }
    }
}

#[cfg(test)]
mod tests;
