//! Starts and ends what this replica shares with others, on a thread of its own.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;

use crate::admin::Readiness;
use crate::config::Config;
use crate::fleet::registry;
use crate::http::drain::Tasks;
use crate::http::io_threads::OffloadThread;
use crate::http::tls;
use crate::observe;
use crate::observe::metrics::Registry;
use crate::peers::routed::RoutedPrompts;
use crate::peers::status::PeerRow;
use crate::peers::{self, Peers};

/// How often this replica announces to the others whether it is ready, with workers.
const READINESS_INTERVAL: Duration = Duration::from_millis(100);
/// Time for the last report and for the ends of the streams.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// A listener for other replicas that is not served yet.
#[derive(Debug)]
pub(super) struct Prepared {
    listener: TcpListener,
    address: SocketAddr,
    settings: peers::Settings,
}

/// What this replica shares, while it runs.
#[derive(Debug)]
pub(super) struct Sharing {
    peers: Peers,
    pub(super) address: SocketAddr,
    /// Stopped after all others.
    tasks: Tasks,
    _thread: OffloadThread,
}

impl Prepared {
    /// The handle, and what is to be started if there are other replicas.
    pub(super) fn new(
        config: &Config,
        listener: Option<TcpListener>,
        tls: Option<Arc<tls::Server>>,
        fleet: &Arc<registry::Registry>,
        routed: &Arc<RoutedPrompts>,
        metrics: &Registry,
    ) -> io::Result<(Peers, Option<Self>)> {
        let Some(listener) = listener else {
            return Ok((Peers::off(metrics), None));
        };
        let address = listener.local_addr()?;
        let settings = config.peers.clone();
        let peers = Peers::new(
            &settings,
            address,
            tls,
            fleet.clone(),
            routed.clone(),
            metrics,
        )?;
        let prepared = Self {
            listener,
            address,
            settings,
        };
        Ok((peers, Some(prepared)))
    }

    /// `tasks` are those of the requests, which end first.
    pub(super) fn start(
        self,
        peers: Peers,
        readiness: Arc<Readiness>,
        tasks: &Tasks,
    ) -> io::Result<Sharing> {
        let thread = OffloadThread::start("peers")?;
        let sharing = tasks.beside();
        let (running, its_tasks) = (peers.clone(), sharing.clone());
        // Registers the socket with the thread's runtime.
        let listener = self.listener.into_std()?;
        let supervisor = tasks.supervisor();
        let following = supervisor.essential("peers", async move {
            match TcpListener::from_std(listener) {
                Ok(listener) => running.run(self.settings, listener, its_tasks).await,
                Err(error) => tracing::error!(%error, "cannot listen for other replicas"),
            }
        });
        sharing.spawn_until_stopped_on(thread.runtime(), following);
        let announced = (peers.clone(), readiness);
        let begin = |(peers, readiness)| announce_readiness(peers, readiness);
        let announcing = supervisor.restarts("peer_readiness", announced, begin);
        tasks.spawn_until_stopped(announcing);
        Ok(Sharing {
            peers,
            address: self.address,
            tasks: sharing,
            _thread: thread,
        })
    }
}

async fn announce_readiness(peers: Peers, readiness: Arc<Readiness>) {
    loop {
        let is_ready = readiness.check().await.is_ok();
        // Others would ask one without workers for what it knows of caches, and wait for it.
        peers.set_ready(is_ready && readiness.has_workers());
        tokio::time::sleep(READINESS_INTERVAL).await;
    }
}

impl Sharing {
    /// How many other replicas are connected.
    pub(super) fn connected(&self) -> usize {
        let status = self.peers.status(observe::now());
        status.map_or(0, |status| {
            let is_connected = |peer: &&PeerRow| peer.state == "connected";
            status.peers.iter().filter(is_connected).count()
        })
    }

    /// Announces to the other replicas that this one drains. It goes on reporting.
    pub(super) fn begin_drain(&self) {
        self.peers.set_draining();
    }

    /// Sends the last report and ends the streams.
    pub(super) async fn end(&self) {
        self.tasks.drain(CLOSE_TIMEOUT).await;
    }
}
