//! One engine's cache events, taken from ZeroMQ and served over gRPC to any number of routers: with a
//! history to go on from, full lists for those who come late, and a name for each life of the engine,
//! so that nobody goes on with what is no longer true.
//!
//! ```text
//! source -> follow: the stream machine -> feed: life (numbers, history, held blocks) -> service: calls
//! ```
//! It keeps the engine's words as they are: what of them can be placed in a tree is for the routers.

pub mod feed;
pub mod follow;
pub mod held;
pub mod history;
pub mod life;
pub mod metrics;
pub mod service;
mod settings;

use std::io::{self, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tracing::{info, warn};

pub use self::settings::Settings;
use crate::http::drain::{Tasks, stop_signal};
use crate::http::io_threads::IoThreads;
use crate::http::server;
use crate::kv::source::Source;
use crate::kv::stream;
use crate::kv::zmq::{self, Zmq};
use crate::observe::metrics::Registry;

/// For calls to be told that they end.
const DRAIN: Duration = Duration::from_secs(2);

/// Follows and serves until told to stop.
pub async fn run(settings: Settings) -> io::Result<()> {
    let bridge = Bridge::bind(&settings).await?;
    writeln!(io::stdout(), "listening on {}", bridge.address())?;
    stop_signal().await?;
    bridge.stop().await;
    Ok(())
}

/// A running bridge.
#[derive(Debug)]
pub struct Bridge {
    address: SocketAddr,
    feeds: Vec<Arc<feed::Feed>>,
    tasks: Tasks,
    /// Connections run there.
    _io_threads: IoThreads,
}

impl Bridge {
    /// Follows the engine that the arguments name.
    pub async fn bind(settings: &Settings) -> io::Result<Self> {
        let targets = settings.targets().map_err(io::Error::other)?;
        let registry = Registry::default();
        let metrics = zmq::Metrics::new(&registry);
        let source = |target| Zmq::new(target, zmq::Settings::default(), metrics.clone());
        let sources = targets.into_iter().map(source).collect();
        Self::start(settings, sources, registry).await
    }

    /// Follows `sources`, one for each rank, and serves what they say.
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
        let io_threads = IoThreads::start(0)?;
        let limits = life::Limits {
            history_batches: settings.history_batches_max,
            history_bytes: settings.history_bytes_max,
            state_bytes: settings.state_bytes_max,
        };
        let mut feeds = Vec::with_capacity(sources.len());
        for (rank, source) in (0..).zip(sources) {
            let feed = Arc::new(feed::Feed::new(rank, limits, metrics.clone()));
            feeds.push(feed.clone());
            let stream = stream::Settings {
                silence_ms: settings.silence_ms,
                ..stream::Settings::default()
            };
            tasks.spawn_until_stopped(follow::follow(source, stream, feed));
        }
        let served = service::Served::new(
            feeds.clone(),
            settings.subscribers_max,
            metrics,
            registry.clone(),
            tasks.clone(),
        );
        let connections = u32::try_from(settings.subscribers_max).unwrap_or(u32::MAX);
        tasks.spawn(server::serve(
            listener,
            server::Settings {
                // Those who ask for health and metrics want a place, too.
                connections_max: connections.saturating_add(16),
                send_timeout_ms: settings.send_timeout_ms,
                ..server::Settings::default()
            },
            server::Metrics::new(&registry),
            move |request, _| served.clone().answer(request),
            io_threads.clone(),
            tasks.clone(),
        ));
        Ok(Self {
            address,
            feeds,
            tasks,
            _io_threads: io_threads,
        })
    }

    /// Where it serves.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends all calls, and everything else.
    pub async fn stop(self) {
        self.tasks.stop();
        for feed in &self.feeds {
            feed.close("the bridge is shutting down");
        }
        match self.tasks.drain(DRAIN).await {
            0 => info!("stopped"),
            left => warn!(left, "connections were cut"),
        }
    }
}

#[cfg(test)]
mod tests;
