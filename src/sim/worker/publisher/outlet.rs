//! The send queue and the replay buffer of one rank's KV events.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::encode;
use super::events;
use super::gate::Cutter;
use super::log::{Log, NumberedBatch};
use super::settings::{Endpoint, Settings};
use crate::observe;
use crate::sim::engine::cache::Change;
use crate::sim::fault::kv::KvFaults;

/// Batches in the send queue; further ones are not sent. vLLM's high-water mark.
const MAX_QUEUED: usize = 100_000;

/// The addresses of one rank's KV events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoundEndpoints {
    pub events: SocketAddr,
    pub replay: Option<SocketAddr>,
}

/// The driver's side of a publisher: numbers batches and queues them for the sockets.
pub(crate) struct Outlet {
    pub(super) settings: Settings,
    pub(super) topic: Bytes,
    rank: u32,
    block_tokens: u32,
    pub(crate) bound: BoundEndpoints,
    pub(super) log: Mutex<Log>,
    commands: mpsc::Sender<Command>,
    pub(super) faults: watch::Sender<KvFaults>,
    cutters: Vec<Cutter>,
}

/// A command to the task that serves the event socket.
pub(super) enum Command {
    /// Disconnect all subscribers.
    Cut,
    Send {
        batch: NumberedBatch,
        due: Instant,
    },
}

impl Outlet {
    pub(super) fn new(
        settings: &Settings,
        rank: u16,
        block_tokens: u32,
        faults: &KvFaults,
        bound: BoundEndpoints,
        cutters: Vec<Cutter>,
    ) -> (Self, mpsc::Receiver<Command>) {
        let log = Log::new(
            settings.first_sequence,
            settings.buffer_steps,
            faults.clone(),
        );
        let (sender, commands) = mpsc::channel(MAX_QUEUED);
        let outlet = Self {
            settings: settings.clone(),
            topic: settings.topic.clone().into(),
            rank: u32::from(rank),
            block_tokens,
            bound,
            log: Mutex::new(log),
            commands: sender,
            faults: watch::Sender::new(faults.clone()),
            cutters,
        };
        (outlet, commands)
    }

    /// Numbers a step's changes and queues them. Never waits.
    pub(crate) fn publish(&self, changes: &[Change]) {
        let timestamp = observe::since_epoch().as_secs_f64();
        let mut batch = events::batch(changes, self.block_tokens, self.rank, timestamp);
        if let Some(medium) = &self.faults.borrow().medium {
            events::set_medium(&mut batch, medium);
        }
        let payload = encode::encode(&batch, self.settings.layout, self.settings.hashes);
        let mut log = self.log.lock();
        let publication = log.publish(payload.into());
        let delay = Duration::from_millis(self.faults.borrow().delay_ms);
        let due = Instant::now() + delay;
        let cut = publication.cut.then_some(Command::Cut);
        let batches = publication.batches.into_iter();
        let send = batches.map(|batch| Command::Send { batch, due });
        // Under the lock, so that batches are queued in the order of their numbers. A full queue drops the batch, as in
        // vLLM.
        for command in cut.into_iter().chain(send) {
            let _ = self.commands.try_send(command);
        }
    }

    pub(crate) fn set_faults(&self, faults: &KvFaults) {
        self.log.lock().set_faults(faults.clone());
        self.faults.send_replace(faults.clone());
        if faults.cut {
            self.cutters.iter().for_each(Cutter::cut);
        }
    }

    pub(crate) fn last_sequence(&self) -> Option<u64> {
        self.log.lock().last_sequence()
    }

    /// This rank's entry in the answer to `GET /kv_event_sources`.
    pub(crate) fn source(&self) -> Value {
        // With the host as given, even if clients cannot use it (`*`).
        let endpoint = |given: &Endpoint, bound: SocketAddr| Endpoint {
            host: given.host.clone(),
            port: bound.port(),
        };
        let Settings { events, replay, .. } = &self.settings;
        let given = events.as_ref().zip(Some(self.bound.events));
        let replay = replay.as_ref().zip(self.bound.replay);
        let text = |(given, bound)| endpoint(given, bound).to_string();
        json!({
            "enable_kv_cache_events": true,
            "publisher": "zmq",
            "endpoint": given.map(text).unwrap_or_default(),
            "replay_endpoint": replay.map(text),
            "buffer_steps": self.settings.buffer_steps,
            "hwm": MAX_QUEUED,
            "max_queue_size": MAX_QUEUED,
            "topic": self.settings.topic,
        })
    }

    /// Waits while the fault `silent` is set.
    pub(super) async fn until_not_silent(&self) {
        let mut faults = self.faults.subscribe();
        // `self` has the sender, so this cannot fail.
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
