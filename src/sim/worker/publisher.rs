//! Publishes what happens to one rank's cache over ZeroMQ, and answers those who ask for it again, as
//! vLLM 0.32 does.
//!
//! Two things are otherwise. Replays are answered beside the publishing and not in between, so a slow
//! asker holds nothing up; and batches have their numbers and can be asked for before they are sent.

mod events;
mod gate;
mod log;
mod settings;

use std::convert::Infallible;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::debug;
use zeromq::PubSocket;
use zeromq::RouterSocket;
use zeromq::Socket;
use zeromq::SocketRecv;
use zeromq::SocketSend;
use zeromq::ZmqMessage;

use self::gate::Cutter;
use self::gate::Gate;
use self::log::Log;
use self::log::Numbered;
pub use self::settings::Endpoint;
pub use self::settings::Hashes;
pub use self::settings::Layout;
pub use self::settings::Settings;
use crate::kv::msgpack::encode;
use crate::sim::engine::cache::Change;
use crate::sim::fault::kv::KvFaults;

/// Batches on their way out; one more is lost to subscribers. vLLM's high-water mark.
const QUEUE_MAX: usize = 100_000;
/// Before the library's socket is asked again after an error.
const ERROR_PAUSE: Duration = Duration::from_millis(20);
/// In place of a number, after the last batch of a replay.
const END: [u8; 8] = [0xff; 8];

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

/// The sockets' end.
pub(super) struct Publisher {
    outlet: Arc<Outlet>,
    orders: mpsc::Receiver<Order>,
    events: (Gate, PubSocket),
    replay: Option<(Gate, RouterSocket)>,
}

enum Order {
    Cut,
    Send { batch: Numbered, due: Instant },
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
    let events_listener = listen(endpoint, rank).await?;
    let (events, events_gate) = inner::<PubSocket>(events_listener).await?;
    let mut bound = Bound {
        events: events_gate.address()?,
        replay: None,
    };
    let mut cutters = vec![events_gate.cutter()];
    let mut replay = None;
    if let Some(endpoint) = &settings.replay {
        let listener = listen(endpoint, rank).await?;
        let (socket, gate) = inner::<RouterSocket>(listener).await?;
        bound.replay = Some(gate.address()?);
        cutters.push(gate.cutter());
        replay = Some((gate, socket));
    }
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
        events: (events_gate, events),
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

/// A socket of the library, and the gate before it.
async fn inner<S: Socket>(listener: TcpListener) -> io::Result<(S, Gate)> {
    let behind = std::net::TcpListener::bind("127.0.0.1:0")?;
    let address = behind.local_addr()?;
    let mut socket = S::new();
    socket
        .bind_listener(behind)
        .await
        .map_err(io::Error::other)?;
    Ok((socket, Gate::new(listener, address)))
}

impl Outlet {
    /// Numbers a step's changes and sends them on their way. Never waits.
    pub(super) fn publish(&self, changes: &[Change]) {
        let timestamp = super::since_epoch().as_secs_f64();
        let batch = events::batch(changes, self.block_tokens, self.rank, timestamp);
        let payload = encode::encode(&batch, self.settings.encoding());
        let mut log = self.log.lock();
        let sending = log.publish(payload.into());
        let delay = Duration::from_millis(self.faults.borrow().delay_ms);
        let due = Instant::now() + delay;
        let cut = sending.cut.then_some(Order::Cut);
        let batches = sending.batches.into_iter();
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

impl Publisher {
    pub(super) fn outlet(&self) -> Arc<Outlet> {
        Arc::clone(&self.outlet)
    }

    /// Serves the sockets for as long as it is polled.
    pub(super) async fn run(self) -> Infallible {
        let Self {
            outlet,
            orders,
            events: (events_gate, events),
            replay,
        } = self;
        let replays = async {
            match replay {
                Some((gate, socket)) => {
                    let cutter = gate.cutter();
                    tokio::select! {
                        never = gate.run() => never,
                        never = answer(&outlet, socket, &cutter) => never,
                    }
                }
                None => std::future::pending().await,
            }
        };
        let cutter = events_gate.cutter();
        tokio::select! {
            never = events_gate.run() => never,
            never = send(&outlet, orders, events, &cutter) => never,
            never = replays => never,
        }
    }
}

async fn send(
    outlet: &Outlet,
    mut orders: mpsc::Receiver<Order>,
    mut socket: PubSocket,
    cutter: &Cutter,
) -> Infallible {
    loop {
        let Some(order) = orders.recv().await else {
            // The outlet has the other end, and is held above.
            std::future::pending().await
        };
        match order {
            Order::Cut => cutter.cut(),
            Order::Send { batch, due } => {
                tokio::time::sleep_until(due).await;
                outlet.may_speak().await;
                let frames = [outlet.topic.clone(), number(batch.sequence), batch.payload];
                if let Err(error) = socket.send(message(frames)).await {
                    debug!(%error, "a batch of cache events was not sent");
                }
            }
        }
    }
}

/// Answers requests for replays, one after the other.
async fn answer(outlet: &Outlet, mut socket: RouterSocket, cutter: &Cutter) -> Infallible {
    loop {
        let request = match socket.recv().await {
            Ok(request) => request.into_vec(),
            Err(error) => {
                debug!(%error, "no request for a replay could be read");
                tokio::time::sleep(ERROR_PAUSE).await;
                continue;
            }
        };
        // What has another shape is passed over without a word, as by vLLM.
        let [asker, _, first] = &request[..] else {
            continue;
        };
        let Ok(first) = <[u8; 8]>::try_from(&first[..]) else {
            continue;
        };
        outlet.may_speak().await;
        if outlet.faults.borrow().replay_refuse {
            cutter.cut();
            continue;
        }
        let replayed = outlet.log.lock().replay(u64::from_be_bytes(first));
        let batches = replayed.batches.into_iter();
        let batches =
            batches.map(|batch| (outlet.topic.clone(), number(batch.sequence), batch.payload));
        let end = (Bytes::new(), Bytes::from_static(&END), Bytes::new());
        for (topic, number, payload) in batches.chain(replayed.ends.then_some(end)) {
            let mut frames = vec![asker.clone(), Bytes::new(), topic, number, payload];
            if outlet.settings.layout == Layout::Array {
                // The releases that write arrays leave the topic out here.
                frames.remove(2);
            }
            // Whoever is gone needs no more.
            let Ok(()) = socket.send(message(frames)).await else {
                break;
            };
        }
    }
}

fn number(sequence: u64) -> Bytes {
    Bytes::copy_from_slice(&sequence.to_be_bytes())
}

fn message(frames: impl Into<Vec<Bytes>>) -> ZmqMessage {
    ZmqMessage::try_from(frames.into()).expect("there are frames")
}

impl fmt::Debug for Outlet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outlet")
            .field("rank", &self.rank)
            .field("bound", &self.bound)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Publisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Publisher").field(&self.outlet).finish()
    }
}
