//! A simulated engine behind real HTTP: answers as a vLLM 0.32 server does, without a model.
//!
//! Below `/sim` are the routes of tests: `GET /sim/requests` (the recorded requests), `GET /sim/cache` (the cached
//! blocks of each dp rank), `GET /sim/kv_transfers` (counters), `POST /sim/faults`. Responses are not stored, so
//! the Responses API has neither `previous_response_id` nor background mode. With a KV connector, prompts are
//! transferred between engines.

mod adapters;
mod body;
mod driver;
mod encode;
mod error;
mod fault_injection;
mod generate;
mod generation;
mod http_answer;
mod in_flight;
mod json;
mod life;
mod lists;
mod metrics;
mod net;
mod own_tokens;
mod pooling;
pub mod publisher;
mod ranks;
mod recorder;
mod request;
mod routes;
mod serve;
mod settings;
mod shared;
mod start;
mod tokenizer;
mod tokens_in_out;
mod transfer;

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::panic::resume_unwind;
use std::pin::pin;
use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

pub use self::driver::CacheContents;
use self::net::accept;
pub use self::recorder::{ReceivedRequest, RequestStats};
use self::routes::Listener;
pub use self::settings::Settings;
use self::shared::Shared;
pub use self::transfer::settings::{Connector, Settings as TransferSettings};
pub use self::transfer::state::TransferStats;
pub use crate::fleet::Role;
use crate::observe;
use crate::sim::engine::{Counters, Gauges};
use crate::sim::fault::Faults;

/// A bound worker. It answers while [`Worker::run`] is polled.
#[derive(Debug)]
pub struct Worker {
    listener: TcpListener,
    /// The bootstrap server of a Mooncake prefill engine, on a free port.
    bootstrap: Option<TcpListener>,
    engines: ranks::Engines,
    handle: Handle,
}

/// A view of a worker, for use while the worker runs elsewhere.
#[derive(Clone, Debug)]
pub struct Handle {
    shared: Arc<Shared>,
}

/// Binds the addresses. Connections are accepted by the kernel from now on and served once the worker runs.
pub async fn bind(settings: Settings) -> io::Result<Worker> {
    let named = |error: io::Error| {
        let message = format!(
            "cannot listen at {}: {error}; give another address with `--listen`",
            settings.listen
        );
        io::Error::new(error.kind(), message)
    };
    let listener = TcpListener::bind(settings.listen).await.map_err(named)?;
    let addr = listener.local_addr()?;
    let bootstrap = match settings.transfer.role() {
        Some(Role::Prefill | Role::Both)
            if settings.transfer.connector == Some(Connector::Mooncake) =>
        {
            Some(TcpListener::bind((addr.ip(), 0)).await?)
        }
        Some(_) | None => None,
    };
    let (ranks, engines) = ranks::bind(&settings).await?;
    let own_tokens = settings.tokenizer.as_deref();
    let own_tokens = own_tokens.map(own_tokens::OwnTokens::read).transpose()?;
    let shared = Arc::new(Shared {
        ranks,
        recorder: recorder::Recorder::default(),
        faults: watch::Sender::new(settings.faults.clone()),
        transfers: transfer::state::State::default(),
        life: life::Life::default(),
        started: observe::since_epoch(),
        addr,
        bootstrap: bootstrap
            .as_ref()
            .map(TcpListener::local_addr)
            .transpose()?,
        own_tokens,
        models: adapters::Models::new(&settings.models),
        settings,
    });
    let handle = Handle { shared };
    Ok(Worker {
        listener,
        bootstrap,
        engines,
        handle,
    })
}

impl Worker {
    pub fn addr(&self) -> SocketAddr {
        self.handle.shared.addr
    }

    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Serves until `shutdown`, or until a request or fault ends the worker. Then all connections are dropped, and all
    /// tasks have ended when this returns, except for short-lived ones of the ZeroMQ library without connections.
    pub async fn run(self, shutdown: impl Future<Output = ()>) {
        let shared = self.handle.shared;
        let mut connections = JoinSet::new();
        let mut accepted: u64 = 0;
        let mut shutdown = pin!(shutdown);
        let mut ended = pin!(shared.life.ended());
        let mut engines = self.engines.spawn();
        loop {
            tokio::select! {
                () = &mut shutdown => break,
                () = &mut ended => break,
                Some(exit) = engines.join_next() => match exit {
                    Ok(never) => match never {},
                    Err(error) => resume_unwind(error.into_panic()),
                },
                Some(_) = connections.join_next() => {}
                stream = accept(&self.listener) => {
                    accepted += 1;
                    let shared = Arc::clone(&shared);
                    connections.spawn(serve::connection(shared, stream, accepted, Listener::Api));
                }
                stream = accept_at(self.bootstrap.as_ref()) => {
                    let shared = Arc::clone(&shared);
                    connections.spawn(serve::connection(shared, stream, 0, Listener::Bootstrap));
                }
            }
        }
        drop(self.listener);
        drop(self.bootstrap);
        engines.shutdown().await;
        connections.shutdown().await;
    }
}

impl Handle {
    pub fn stats(&self) -> RequestStats {
        self.shared.recorder.stats()
    }

    pub fn set_faults(&self, faults: Faults) {
        self.shared.set_faults(faults);
    }

    pub fn gauges(&self) -> Gauges {
        self.shared.ranks.gauges()
    }

    pub fn counters(&self) -> Counters {
        self.shared.ranks.counters()
    }

    /// The address of a Mooncake prefill engine's bootstrap server.
    pub fn bootstrap(&self) -> Option<SocketAddr> {
        self.shared.bootstrap
    }

    pub fn kv_transfers(&self) -> TransferStats {
        self.shared.kv_transfers()
    }

    /// The endpoints of each rank's KV events; empty if they are off.
    pub fn kv_events(&self) -> Vec<publisher::BoundEndpoints> {
        self.shared.ranks.bound()
    }

    /// What a rank caches now, and the number of the last batch that it published.
    pub fn cache_contents(&self, rank: usize) -> CacheContents {
        self.shared.ranks.cache_contents(rank)
    }

    /// Clears the caches, as `POST /reset_prefix_cache` does. Returns false, and clears nothing, while blocks are in use.
    pub fn reset(&self) -> bool {
        self.shared.ranks.reset()
    }
}

async fn accept_at(listener: Option<&TcpListener>) -> tokio::net::TcpStream {
    match listener {
        Some(listener) => accept(listener).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
