//! Publishes what happens to one rank's cache over ZeroMQ, and answers those who ask for it again, as
//! vLLM 0.32 does.
//!
//! Two things are otherwise. Replays are answered beside the publishing and not in between, so a slow
//! asker holds nothing up; and batches have their numbers and can be asked for before they are sent.

mod events;
mod gate;
mod log;
mod settings;
mod sockets;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use bytes::Bytes;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use self::gate::Cutter;
use self::log::{Log, NumberedBatch};
pub use self::settings::{Endpoint, Hashes, Layout, Settings};
use self::sockets::Guarded;
pub(super) use self::sockets::Publisher;
use crate::kv::msgpack::encode;
use crate::sim::engine::cache::Change;
use crate::sim::fault::kv::KvFaults;

/// Batches on their way out; one more is lost to subscribers. vLLM's high-water mark.
const QUEUE_MAX: usize = 100_000;

/// Where one rank's events are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bound {
    pub events: SocketAddr,
    pub replay: Option<SocketAddr>,
}

/// The driver's end: what is published here goes out as soon as the sockets are served.
pub(super) struct Outlet {
    settings: Settings,
    topic: Bytes,
    rank: u32,
    block_tokens: u32,
    bound: Bound,
    log: Mutex<Log>,
    orders: mpsc::Sender<Order>,
    faults: watch::Sender<KvFaults>,
    cutters: Vec<Cutter>,
}

enum Order {
    Cut,
    Send { batch: NumberedBatch, due: Instant },
}

/// One rank in the answer to `GET /kv_event_sources`.
#[derive(Serialize)]
pub(super) struct Source {
    enable_kv_cache_events: bool,
    publisher: &'static str,
    endpoint: String,
    replay_endpoint: Option<String>,
    buffer_steps: usize,
    hwm: usize,
    max_queue_size: usize,
    topic: String,
}

/// Takes the addresses; nothing if events are off.
pub(super) async fn bind(
    settings: &Settings,
    rank: u16,
    block_tokens: u32,
    faults: &KvFaults,
) -> io::Result<Option<Publisher>> {
    let Some(endpoint) = &settings.events else {
        return Ok(None);
    };
    let events = Guarded::bind(listen(endpoint, rank).await?).await?;
    let replay = match &settings.replay {
        Some(endpoint) => Some(Guarded::bind(listen(endpoint, rank).await?).await?),
        None => None,
    };
    let replay_address = replay.as_ref().map(|replay| replay.gate.address());
    let bound = Bound {
        events: events.gate.address()?,
        replay: replay_address.transpose()?,
    };
    let mut cutters = vec![events.gate.cutter()];
    cutters.extend(replay.as_ref().map(|replay| replay.gate.cutter()));
    let log = Log::new(
        settings.first_sequence,
        settings.buffer_steps,
        faults.clone(),
    );
    let (sender, orders) = mpsc::channel(QUEUE_MAX);
    let outlet = Outlet {
        settings: settings.clone(),
        topic: settings.topic.clone().into(),
        rank: u32::from(rank),
        block_tokens,
        bound,
        log: Mutex::new(log),
        orders: sender,
        faults: watch::Sender::new(faults.clone()),
        cutters,
    };
    Ok(Some(Publisher {
        outlet: Arc::new(outlet),
        orders,
        events,
        replay,
    }))
}

async fn listen(endpoint: &Endpoint, rank: u16) -> io::Result<TcpListener> {
    let of_rank = endpoint.of_rank(rank);
    let no_port = || io::Error::other(format!("{endpoint}: no port for rank {rank}"));
    let endpoint = of_rank.ok_or_else(no_port)?;
    TcpListener::bind(endpoint.address())
        .await
        .map_err(|error| io::Error::new(error.kind(), format!("{endpoint}: {error}")))
}

impl Outlet {
    /// Numbers a step's changes and sends them on their way. Never waits.
    pub(super) fn publish(&self, changes: &[Change]) {
        let timestamp = super::since_epoch().as_secs_f64();
        let mut batch = events::batch(changes, self.block_tokens, self.rank, timestamp);
        if let Some(medium) = &self.faults.borrow().medium {
            events::move_to(&mut batch, medium);
        }
        let payload = encode::encode(&batch, self.settings.encoding());
        let mut log = self.log.lock();
        let publication = log.publish(payload.into());
        let delay = Duration::from_millis(self.faults.borrow().delay_ms);
        let due = Instant::now() + delay;
        let cut = publication.cut.then_some(Order::Cut);
        let batches = publication.batches.into_iter();
        let send = batches.map(|batch| Order::Send { batch, due });
        // In the order of the numbers, so under the lock. What finds no room is lost to subscribers, as
        // in life; and if nobody serves the sockets any more, nobody listens either.
        for order in cut.into_iter().chain(send) {
            let _ = self.orders.try_send(order);
        }
    }

    pub(super) fn set_faults(&self, faults: &KvFaults) {
        self.log.lock().set_faults(faults.clone());
        self.faults.send_replace(faults.clone());
        if faults.cut {
            self.cutters.iter().for_each(Cutter::cut);
        }
    }

    pub(super) fn bound(&self) -> &Bound {
        &self.bound
    }

    pub(super) fn last_sequence(&self) -> Option<u64> {
        self.log.lock().last_sequence()
    }

    pub(super) fn source(&self) -> Source {
        // With the host as it was given, which others may not be able to use: `*`, say.
        let endpoint = |given: &Endpoint, bound: SocketAddr| Endpoint {
            host: given.host.clone(),
            port: bound.port(),
        };
        let Settings { events, replay, .. } = &self.settings;
        let given = events.as_ref().zip(Some(self.bound.events));
        let replay = replay.as_ref().zip(self.bound.replay);
        let text = |(given, bound)| endpoint(given, bound).to_string();
        Source {
            enable_kv_cache_events: true,
            publisher: "zmq",
            endpoint: given.map(text).unwrap_or_default(),
            replay_endpoint: replay.map(text),
            buffer_steps: self.settings.buffer_steps.get(),
            hwm: QUEUE_MAX,
            max_queue_size: QUEUE_MAX,
            topic: self.settings.topic.clone(),
        }
    }

    /// Waits while a fault switch keeps it silent.
    async fn may_speak(&self) {
        let mut faults = self.faults.subscribe();
        // The sender is this outlet's own, so there is no error.
        let _ = faults.wait_for(|faults| !faults.silent).await;
    }
}

impl fmt::Debug for Outlet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outlet")
            .field("rank", &self.rank)
            .field("bound", &self.bound)
            .finish_non_exhaustive()
    }
}
