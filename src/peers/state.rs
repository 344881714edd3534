//! What the streams of this replica share: its gauges, the other replicas and their load, and how to reach each stream.
//! Everything happens on the thread of the replicas; pages read it now and then.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::gauges::{Condition, Gauges, WorkerLoad};
use super::handshake::{Identity, InstanceId, PeerIdentity, Side};
use super::link::Outgoing;
use super::load_table::LoadTable;
use super::message::framed;
use super::metrics::Metrics;
use super::numbers::WorkerKey;
use super::roster::{Admission, Change, Freshness, Peer, Roster, StreamId};
use super::routed::{RoutedPrompts, RoutedWorker};
use super::settings::Advanced;
use super::status::{LoadRow, PeerRow, ReplicaRow, Status};
use super::wire;
use super::wire::peer_message::Kind;
use crate::fleet::registry::Registry;
use crate::fleet::{Snapshot, Worker};
use crate::ids::WorkerId;

/// Shared by all streams.
#[derive(Debug)]
pub(super) struct State {
    pub(super) identity: Arc<Identity>,
    pub(super) settings: Advanced,
    pub(super) metrics: Metrics,
    fleet: Arc<Registry>,
    routed: Arc<RoutedPrompts>,
    /// Other replicas are expected, and none is heard.
    is_alone: AtomicBool,
    is_ready: AtomicBool,
    is_draining: AtomicBool,
    inner: Mutex<Inner>,
    /// Changes whenever a replica is connected or lost.
    version: watch::Sender<u64>,
}

#[derive(Debug)]
struct Inner {
    gauges: Gauges,
    roster: Roster,
    table: LoadTable,
    streams: BTreeMap<StreamId, Stream>,
    addresses: BTreeMap<Arc<str>, AddressState>,
    snapshot: Arc<Snapshot>,
    workers: FxHashMap<Arc<str>, Arc<Worker>>,
}

/// The sending half of a stream.
#[derive(Debug)]
struct Stream {
    outgoing: Outgoing,
    /// A report did not fit, so the next one must be whole.
    has_missed: bool,
    end: CancellationToken,
}

/// How a listed address is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AddressState {
    Connecting,
    /// This replica's own.
    Itself,
    Connected(InstanceId),
    NotListening,
    Lost(String),
    /// One side does not accept the other.
    Refused(String),
}

impl State {
    pub(super) fn new(
        now: Instant,
        identity: Identity,
        settings: Advanced,
        fleet: Arc<Registry>,
        routed: Arc<RoutedPrompts>,
        metrics: Metrics,
    ) -> Arc<Self> {
        let roster = Roster::new(
            identity.id,
            settings.stale_after,
            settings.dead_after,
            settings.max_peers as usize,
        );
        Arc::new(Self {
            inner: Mutex::new(Inner {
                gauges: Gauges::new(now, settings.heartbeat_interval),
                roster,
                table: LoadTable::new(settings.max_workers as usize),
                streams: BTreeMap::new(),
                addresses: BTreeMap::new(),
                snapshot: Arc::default(),
                workers: FxHashMap::default(),
            }),
            identity: Arc::new(identity),
            settings,
            metrics,
            fleet,
            routed,
            is_alone: AtomicBool::new(false),
            is_ready: AtomicBool::new(false),
            is_draining: AtomicBool::new(false),
            version: watch::Sender::new(0),
        })
    }

    pub(super) fn is_alone(&self) -> bool {
        self.is_alone.load(Relaxed)
    }

    pub(super) fn set_ready(&self, is_ready: bool) {
        self.is_ready.store(is_ready, Relaxed);
    }

    pub(super) fn set_draining(&self) {
        self.is_draining.store(true, Relaxed);
    }

    /// A new stream of a replica, with what ends it; `None` if it is not used. The whole state is sent at once.
    pub(super) fn open(
        &self,
        now: Instant,
        peer: &PeerIdentity,
        side: Side,
        address: Option<Arc<str>>,
        outgoing: &Outgoing,
    ) -> Result<(StreamId, CancellationToken), &'static str> {
        let inner = &mut *self.inner.lock();
        let stream = match inner.roster.admit(now, peer, side, address) {
            Admission::First(stream) => {
                self.metrics.connections.inc();
                info!(peer = %peer.name, id = %peer.id, release = %peer.release, "replica connected");
                stream
            }
            Admission::Replaces { stream, former } => {
                if let Some(former) = inner.streams.remove(&former) {
                    former.end.cancel();
                }
                stream
            }
            Admission::Duplicate => return Err("it is connected by another stream"),
            Admission::Full => {
                self.metrics.refused.with_label_values(&["full"]).inc();
                return Err("too many replicas; see `peers.advanced.max_peers`");
            }
        };
        inner.table.on_stream(peer.id);
        let end = CancellationToken::new();
        let mut opened = Stream {
            outgoing: outgoing.clone(),
            has_missed: true,
            end: end.clone(),
        };
        self.refresh_fleet(now, inner);
        opened.send(&self.metrics, &[], || inner.gauges.whole());
        inner.streams.insert(stream, opened);
        self.routed.set_heard(true);
        self.routed.on_missed(now);
        self.update_alone(now, inner);
        self.version.send_modify(|version| *version += 1);
        Ok((stream, end))
    }

    /// A stream has ended, for whatever reason.
    pub(super) fn close(&self, now: Instant, peer: InstanceId, stream: StreamId, reason: &str) {
        let inner = &mut *self.inner.lock();
        inner.streams.remove(&stream);
        self.routed.set_heard(!inner.streams.is_empty());
        let Some(lost) = inner.roster.on_end(peer, stream) else {
            return;
        };
        inner.table.remove(peer);
        self.apply(inner, false);
        let name = &lost.identity.name;
        match lost.is_draining {
            true => {
                self.metrics.lost.with_label_values(&["drained"]).inc();
                info!(peer = %name, id = %peer, "replica has drained and left");
            }
            false => {
                let is_silent =
                    now.saturating_duration_since(lost.heard_at) >= self.settings.dead_after;
                let kind = if is_silent { "silent" } else { "closed" };
                self.metrics.lost.with_label_values(&[kind]).inc();
                warn!(peer = %name, id = %peer, reason, "replica lost; its load no longer counts");
            }
        }
        self.update_alone(now, inner);
        self.version.send_modify(|version| *version += 1);
    }

    /// A message of a replica, of so many bytes.
    pub(super) fn on_message(
        &self,
        now: Instant,
        peer: InstanceId,
        stream: StreamId,
        kind: Option<Kind>,
        bytes: usize,
    ) {
        self.metrics.received.inc_by(bytes as u64);
        let mut guard = self.inner.lock();
        let inner = &mut *guard;
        if !inner.roster.on_message(now, peer, stream) {
            return;
        }
        match kind {
            Some(Kind::Workers(names)) => {
                let applied = inner.table.on_names(peer, &names);
                self.metrics.ignored.inc_by(applied.ignored.into());
            }
            Some(Kind::Load(report)) => {
                let applied = inner.table.on_report(peer, &report);
                self.metrics.ignored.inc_by(applied.ignored.into());
                let (is_ready, is_draining) = (report.is_ready, report.is_draining);
                inner.roster.set_condition(peer, is_ready, is_draining);
                self.refresh_fleet(now, inner);
                self.apply(inner, applied.is_first);
            }
            Some(Kind::Routed(message)) => {
                self.refresh_fleet(now, inner);
                let workers = inner.routed_workers(peer, &message);
                // Blocks are placed without the lock, which pages take too.
                drop(guard);
                let worker_of = |number| workers.get(&number).copied();
                self.routed.apply(now, &message, worker_of);
            }
            // Handshakes and trees have their own places.
            Some(Kind::Hello(_) | Kind::Proof(_) | Kind::TreeRequest(_) | Kind::TreeChunk(_))
            | None => {}
        }
    }

    /// Reports to all streams what changed, and looks for replicas that fell silent.
    pub(super) fn tick(&self, now: Instant) {
        let inner = &mut *self.inner.lock();
        self.refresh_fleet(now, inner);
        let condition = Condition {
            is_ready: self.is_ready.load(Relaxed),
            is_draining: self.is_draining.load(Relaxed),
        };
        let workers = inner.workers.iter();
        let loads = workers.map(|(address, worker)| (address, own_load(worker)));
        let report = inner.gauges.report(now, condition, loads);
        let mut messages: [Bytes; 2] = Default::default();
        let mut count = 0;
        for message in report.names.into_iter().chain(report.load) {
            messages[count] = message;
            count += 1;
        }
        let routed = inner.routed_message(&self.routed);
        for stream in inner.streams.values_mut() {
            stream.send(&self.metrics, &messages[..count], || inner.gauges.whole());
            if let Some(routed) = &routed
                && !stream.send_routed(&self.metrics, routed)
            {
                self.routed.on_missed(now);
            }
        }
        for change in inner.roster.on_time(now) {
            match change {
                Change::BecameStale(id) => {
                    let name = inner.roster.peer(id).map(|peer| &*peer.identity.name);
                    warn!(peer = name, %id, "replica is silent; its last load still counts");
                }
                Change::HeardAgain(id) => {
                    let name = inner.roster.peer(id).map(|peer| &*peer.identity.name);
                    info!(peer = name, %id, "replica is heard again");
                }
                Change::Dead(_, stream) => {
                    if let Some(stream) = inner.streams.get(&stream) {
                        stream.end.cancel();
                    }
                }
            }
        }
        self.update_alone(now, inner);
    }

    /// True while there is somebody to report to.
    pub(super) fn has_streams(&self) -> bool {
        !self.inner.lock().streams.is_empty()
    }

    pub(super) fn is_connected(&self, peer: InstanceId) -> bool {
        self.inner.lock().roster.is_connected(peer)
    }

    /// Notifies of each replica that is connected or lost.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// Lets a stream end once what is queued is sent.
    pub(super) fn end_sending(&self, stream: StreamId) {
        self.inner.lock().streams.remove(&stream);
    }

    /// Keeps only the listed addresses.
    pub(super) fn set_addresses(&self, now: Instant, listed: impl Fn(&str) -> bool) {
        let inner = &mut *self.inner.lock();
        inner.addresses.retain(|address, _| listed(address));
        self.update_alone(now, inner);
    }

    /// Returns the address's former state.
    pub(super) fn set_address(
        &self,
        now: Instant,
        address: &Arc<str>,
        state: AddressState,
    ) -> Option<AddressState> {
        let inner = &mut *self.inner.lock();
        let former = inner.addresses.insert(address.clone(), state);
        self.update_alone(now, inner);
        former
    }

    /// Replicas that could be asked for their trees: `HOST:PORT` of each that is heard, ready and not draining.
    pub(super) fn ready_peers(&self, now: Instant) -> Vec<Arc<str>> {
        let inner = self.inner.lock();
        let is_asked = |peer: &&Peer| {
            let is_fresh = inner.roster.freshness(now, peer) == Freshness::Connected;
            is_fresh && peer.is_ready && !peer.is_draining
        };
        let ready = inner.roster.peers().filter(is_asked);
        ready.filter_map(|peer| peer.address.clone()).collect()
    }

    /// Whether a replica may soon be known to be ready: an address was not tried yet, or a connected replica has not
    /// reported.
    pub(super) fn may_become_ready(&self) -> bool {
        let inner = self.inner.lock();
        let mut addresses = inner.addresses.values();
        let mut peers = inner.roster.peers();
        addresses.any(|state| *state == AddressState::Connecting)
            || peers.any(|peer| !inner.table.has_reported(peer.identity.id))
    }

    /// Whether any listed address was looked at.
    pub(super) fn has_addresses(&self) -> bool {
        !self.inner.lock().addresses.is_empty()
    }

    pub(super) fn status(&self, now: Instant) -> Status {
        let inner = self.inner.lock();
        let peers = inner.roster.peers().map(|peer| {
            let id = peer.identity.id;
            PeerRow {
                name: Some(peer.identity.name.to_string()),
                instance_id: Some(id.to_string()),
                address: peer.address.as_deref().map(str::to_owned),
                state: match inner.roster.freshness(now, peer) {
                    Freshness::Connected => "connected",
                    Freshness::Stale => "stale",
                },
                error: None,
                release: Some(peer.identity.release.to_string()),
                is_ready: peer.is_ready,
                is_draining: peer.is_draining,
                age_ms: Some(millis(now.saturating_duration_since(peer.heard_at))),
                lag_ms: Some(millis(self.lag(now, &inner, peer))),
                unknown_workers: self.unknown(&inner, id),
            }
        });
        let mut peers: Vec<PeerRow> = peers.collect();
        for (address, state) in &inner.addresses {
            let (state, error) = match state {
                AddressState::Connected(_) | AddressState::Itself => continue,
                AddressState::Connecting => ("unreachable", None),
                AddressState::NotListening => {
                    ("unreachable", Some("nothing listens there".to_owned()))
                }
                AddressState::Lost(reason) => ("unreachable", Some(reason.clone())),
                AddressState::Refused(reason) => ("refused", Some(reason.clone())),
            };
            peers.push(PeerRow {
                address: Some(address.to_string()),
                state,
                error,
                ..PeerRow::default()
            });
        }
        let replica = ReplicaRow {
            name: self.identity.name.to_string(),
            instance_id: self.identity.id.to_string(),
            is_alone: self.is_alone(),
        };
        Status { replica, peers }
    }

    /// What each other replica has at a worker.
    pub(super) fn loads(&self, address: &str) -> Vec<LoadRow> {
        let inner = self.inner.lock();
        let row = |peer: &Peer| {
            let load = inner.table.load(peer.identity.id, address);
            (!load.is_zero()).then(|| LoadRow {
                replica: peer.identity.name.to_string(),
                requests: load.requests,
                queued_tokens: load.queued_tokens,
                decode_tokens: load.decode_tokens,
            })
        };
        inner.roster.peers().filter_map(row).collect()
    }

    /// Sets the gauges that are read only when somebody looks.
    pub(super) fn update_metrics(&self, now: Instant) {
        let status = self.status(now);
        for state in ["connected", "stale", "unreachable", "refused"] {
            let count = status.peers.iter().filter(|peer| peer.state == state);
            let gauge = self.metrics.peers.with_label_values(&[state]);
            gauge.set(count.count() as i64);
        }
        self.metrics.lag.reset();
        let mut unknown = 0;
        let inner = self.inner.lock();
        for peer in inner.roster.peers() {
            let lag = self.metrics.lag.with_label_values(&[&*peer.identity.name]);
            let seconds = self.lag(now, &inner, peer).as_secs_f64();
            lag.set(lag.get().max(seconds));
            unknown += self.unknown(&inner, peer.identity.id);
        }
        self.metrics.unknown_workers.set(unknown as i64);
    }

    /// Age of the newest state of a replica.
    fn lag(&self, now: Instant, inner: &Inner, peer: &Peer) -> Duration {
        let age = inner.table.age(peer.identity.id);
        now.saturating_duration_since(peer.heard_at) + age
    }

    fn unknown(&self, inner: &Inner, peer: InstanceId) -> usize {
        let is_listed = |address: &str| inner.workers.contains_key(address);
        inner.table.unknown_workers(peer, is_listed)
    }

    /// Takes over a change of the fleet: who its workers are, and what others have there.
    fn refresh_fleet(&self, now: Instant, inner: &mut Inner) {
        let snapshot = self.fleet.snapshot();
        if Arc::ptr_eq(&snapshot, &inner.snapshot) {
            return;
        }
        inner.snapshot = snapshot.clone();
        let workers = inner.snapshot.workers.iter().map(|status| {
            let worker = &status.worker;
            (Arc::from(worker.pool.address()), worker.clone())
        });
        inner.workers = workers.collect();
        let workers = &inner.workers;
        inner
            .gauges
            .forget(now, |address| workers.contains_key(address));
        for (address, worker) in workers {
            set_peers(worker, inner.table.sum(address));
        }
    }

    /// Writes changed sums to where routing reads them. `is_first`: a replica has just connected, whose requests the
    /// engines had reported as foreign.
    fn apply(&self, inner: &mut Inner, is_first: bool) {
        for (address, sum) in inner.table.take_changed() {
            if let Some(worker) = inner.workers.get(&address) {
                set_peers(worker, sum);
                if is_first {
                    worker.load.recount_foreign();
                }
            }
        }
    }

    fn update_alone(&self, now: Instant, inner: &Inner) {
        // Where nothing listens there is no replica, and a replica is not cut off from itself.
        let is_expected = |state: &AddressState| {
            !matches!(state, AddressState::Itself | AddressState::NotListening)
        };
        let is_fresh = |peer: &Peer| inner.roster.freshness(now, peer) == Freshness::Connected;
        let is_alone =
            inner.addresses.values().any(is_expected) && !inner.roster.peers().any(is_fresh);
        if self.is_alone.swap(is_alone, Relaxed) != is_alone {
            match is_alone {
                true => warn!("no other replica is heard; routing without their load"),
                false => info!("not cut off from other replicas"),
            }
        }
    }
}

impl Inner {
    /// What this replica routed since the last report, for all replicas.
    fn routed_message(&self, routed: &RoutedPrompts) -> Option<Bytes> {
        let mut numbers: FxHashMap<WorkerId, Option<u32>> = FxHashMap::default();
        let message = routed.take_message(|id| {
            *numbers.entry(id).or_insert_with(|| {
                let mut workers = self.workers.iter();
                let (address, _) = workers.find(|(_, worker)| worker.id == id)?;
                self.gauges.numbers.known(&WorkerKey {
                    address: address.clone(),
                    rank: None,
                })
            })
        })?;
        Some(framed(Kind::Routed(message)))
    }

    /// The workers that a replica's message names, by its numbers.
    fn routed_workers(
        &self,
        peer: InstanceId,
        message: &wire::RoutedPrompts,
    ) -> FxHashMap<u32, RoutedWorker> {
        let prompts = message.prompts.iter().map(|prompt| prompt.number);
        let unconfirmed = message.unconfirmed.iter().map(|prompt| prompt.number);
        let mut workers = FxHashMap::default();
        for number in prompts.chain(unconfirmed) {
            let Some(key) = self.table.key(peer, number) else {
                continue;
            };
            if let Some(worker) = self.workers.get(&key.address) {
                workers.entry(number).or_insert(RoutedWorker {
                    id: worker.id,
                    cache_tokens: worker.cache_tokens.load(Relaxed),
                });
            }
        }
        workers
    }
}

impl Stream {
    /// Sends routed prompts. False if there is no room.
    fn send_routed(&mut self, metrics: &Metrics, message: &Bytes) -> bool {
        if self.has_missed || self.outgoing.try_send(Ok(message.clone())).is_err() {
            return false;
        }
        metrics.sent.inc_by(message.len() as u64);
        true
    }

    /// Sends messages, or the whole state if something was missed. What does not fit is missed.
    fn send(&mut self, metrics: &Metrics, messages: &[Bytes], whole: impl FnOnce() -> [Bytes; 2]) {
        let whole = self.has_missed.then(whole);
        let messages = match &whole {
            Some(whole) => &whole[..],
            None => messages,
        };
        if self.outgoing.capacity() < messages.len() {
            if !self.has_missed {
                self.has_missed = true;
                metrics.skipped.inc();
            }
            return;
        }
        self.has_missed = false;
        for message in messages {
            metrics.sent.inc_by(message.len() as u64);
            // Fails only if the stream has ended, which its own task notices.
            let _ = self.outgoing.try_send(Ok(message.clone()));
        }
    }
}

fn own_load(worker: &Worker) -> WorkerLoad {
    WorkerLoad {
        requests: worker.load.own_requests().into(),
        queued_tokens: worker.load.own_queued_tokens(),
        decode_tokens: worker.load.own_decode_tokens(),
    }
}

fn set_peers(worker: &Worker, sum: WorkerLoad) {
    let requests = u32::try_from(sum.requests).unwrap_or(u32::MAX);
    worker
        .load
        .set_peers(requests, sum.queued_tokens, sum.decode_tokens);
}

fn millis(duration: Duration) -> u64 {
    duration.as_millis() as u64
}
