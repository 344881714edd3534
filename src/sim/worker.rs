//! A pretend engine behind real HTTP: what a vLLM 0.32 server answers, without a model.
//!
//! `GET /seen` tells what it was sent, `GET /held` what each rank's cache holds, and `POST /fault` makes it misbehave. Nothing is stored, so
//! the Responses API has no `previous_response_id` and no background here. With a connector, prompts are handed over between
//! workers, and `GET /sim/handoffs` tells what came of it.

mod answer;
mod ask;
mod body;
mod completions;
mod driver;
mod generate;
mod life;
mod lists;
mod metrics;
mod own_tokens;
mod pooling;
mod problem;
pub mod publisher;
mod ranks;
mod responses;
mod seen;
mod serve;
mod settings;
mod tokenizer;
mod transfer;

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::panic::resume_unwind;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tracing::warn;

pub use self::ranks::Truth;
pub use self::seen::{Arrival, Stats};
use self::serve::Entrance;
pub use self::settings::Settings;
pub use self::transfer::{Connector, Role, Settings as TransferSettings, TransferStats};
use crate::sim::engine::{Counters, Gauges};
use crate::sim::fault::Faults;

/// How long to wait when the system gives no connection, say because too many files are open.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// A bound worker. It answers while [`Worker::run`] is polled.
#[derive(Debug)]
pub struct Worker {
    listener: TcpListener,
    /// Of Mooncake's prefill engines.
    bootstrap: Option<TcpListener>,
    engines: ranks::Engines,
    handle: Handle,
}

/// A view of a worker, to be kept while it runs elsewhere.
#[derive(Clone, Debug)]
pub struct Handle {
    shared: Arc<Shared>,
}

/// What all connections share.
#[derive(Debug)]
struct Shared {
    settings: Settings,
    addr: SocketAddr,
    /// Where it tells other engines who it is, if they ask for that.
    bootstrap: Option<SocketAddr>,
    ranks: ranks::Ranks,
    seen: Arc<seen::Seen>,
    faults: Mutex<Faults>,
    transfers: transfer::State,
    life: life::Life,
    own_tokens: Option<own_tokens::OwnTokens>,
    /// Since the Unix epoch.
    started: Duration,
}

/// Takes the addresses. Connections queue up from now on, and are served once the worker runs.
pub async fn bind(settings: Settings) -> io::Result<Worker> {
    let listener = TcpListener::bind(settings.listen).await?;
    let addr = listener.local_addr()?;
    let bootstrap = match settings.transfer.role() {
        Some(Role::Prefill | Role::Both)
            if settings.transfer.connector == Some(Connector::Mooncake) =>
        {
            let anywhere = SocketAddr::new(addr.ip(), 0);
            let address = settings.transfer.bootstrap.unwrap_or(anywhere);
            Some(TcpListener::bind(address).await?)
        }
        Some(_) | None => None,
    };
    let (ranks, engines) = ranks::bind(&settings).await?;
    let own_tokens = settings.tokenizer.as_deref();
    let own_tokens = own_tokens.map(own_tokens::OwnTokens::read).transpose()?;
    let shared = Arc::new(Shared {
        ranks,
        seen: Arc::default(),
        faults: Mutex::new(settings.faults.clone()),
        transfers: transfer::State::default(),
        life: life::Life::default(),
        started: since_epoch(),
        addr,
        bootstrap: bootstrap
            .as_ref()
            .map(TcpListener::local_addr)
            .transpose()?,
        own_tokens,
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

    pub fn stats(&self) -> Stats {
        self.handle.stats()
    }

    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Serves until `shutdown`, or until it dies of something that it was asked. Then everything ends at once: open connections are dropped, and none
    /// of their tasks is left when this returns, but for the ZeroMQ library's own, which end soon and
    /// to which nobody is connected.
    pub async fn run(self, shutdown: impl Future<Output = ()>) {
        let shared = self.handle.shared;
        let mut connections = JoinSet::new();
        let mut accepted: u64 = 0;
        let mut shutdown = pin!(shutdown);
        let mut over = pin!(shared.life.over());
        let mut engines = self.engines.spawn();
        loop {
            tokio::select! {
                () = &mut shutdown => break,
                () = &mut over => break,
                Some(ended) = engines.join_next() => match ended {
                    Ok(never) => match never {},
                    Err(error) => resume_unwind(error.into_panic()),
                },
                Some(_) = connections.join_next() => {}
                stream = accept(&self.listener) => {
                    accepted += 1;
                    let shared = Arc::clone(&shared);
                    connections.spawn(serve::connection(shared, stream, accepted, Entrance::Api));
                }
                stream = accept_at(self.bootstrap.as_ref()) => {
                    let shared = Arc::clone(&shared);
                    connections.spawn(serve::connection(shared, stream, 0, Entrance::Bootstrap));
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
    pub fn stats(&self) -> Stats {
        self.shared.seen.stats()
    }

    pub fn faults(&self) -> Faults {
        self.shared.faults()
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

    /// Where a Mooncake prefill engine tells who it is.
    pub fn bootstrap(&self) -> Option<SocketAddr> {
        self.shared.bootstrap
    }

    pub fn kv_transfers(&self) -> TransferStats {
        self.shared.kv_transfers()
    }

    /// Where each rank's cache events are; empty if they are off.
    pub fn kv_events(&self) -> Vec<publisher::Bound> {
        self.shared.ranks.bound()
    }

    /// What a rank holds now, and the number of the last batch that it published.
    pub fn truth(&self, rank: usize) -> Truth {
        self.shared.ranks.truth(rank)
    }

    /// As `POST /reset_prefix_cache`: false, and unchanged, where requests hold blocks.
    pub fn reset(&self) -> bool {
        self.shared.ranks.reset()
    }
}

impl Shared {
    fn faults(&self) -> Faults {
        self.faults.lock().clone()
    }

    fn set_faults(&self, faults: Faults) {
        // The lock keeps two sets from mixing.
        let mut current = self.faults.lock();
        self.ranks.set_faults(&faults.kv);
        *current = faults;
    }

    fn kv_transfers(&self) -> TransferStats {
        let (gauges, counters) = (self.ranks.gauges(), self.ranks.counters());
        TransferStats {
            pinned: gauges.kept,
            pinned_blocks: gauges.kept_blocks,
            pinned_blocks_peak: counters.kept_blocks_peak,
            expired: counters.kept_expired,
            received_tokens: counters.received_tokens,
            ..self.transfers.counts()
        }
    }

    /// As when vLLM meets what it did not expect: what runs ends with an error, and the process soon.
    fn core_dies(&self) {
        self.life.core_dies();
        self.ranks.die();
    }

    fn started_unix_seconds(&self) -> u64 {
        self.started.as_secs()
    }

    fn now_unix_seconds(&self) -> u64 {
        since_epoch().as_secs()
    }
}

async fn accept_at(listener: Option<&TcpListener>) -> tokio::net::TcpStream {
    match listener {
        Some(listener) => accept(listener).await,
        None => std::future::pending().await,
    }
}

async fn accept(listener: &TcpListener) -> tokio::net::TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            Err(error) => {
                warn!(%error, "no connection accepted; trying again");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

fn since_epoch() -> Duration {
    // A clock before 1970 only makes the timestamps wrong.
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests;
