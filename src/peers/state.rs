//! What the streams of this replica share: its gauges, the other replicas and their load, and how to reach each stream.
//! Everything happens on the thread of the replicas; pages read it now and then.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::addresses::AddressState;
use super::gauges::{Condition, Gauges};
use super::handshake::{Identity, InstanceId, PeerIdentity, Side};
use super::link::{Outgoing, TreeHandler};
use super::load_table::LoadTable;
use super::metrics::Metrics;
use super::pace::Wakes;
use super::roster::{Admission, Freshness, Peer, Roster, StreamId};
use super::routed::RoutedPrompts;
use super::said::{Level, Said};
use super::settings::{Advanced, Settings};
use super::status::{self, LoadRow, ReplicaRow, Status};
use super::streams::Streams;
use super::wire::peer_message::Kind;
use super::workers::Workers;
use crate::fleet::registry::Registry;
use crate::http::tls;

#[derive(Debug)]
pub(super) struct State {
    pub(super) identity: Arc<Identity>,
    /// Of connections in both directions.
    pub(super) tls: Option<Arc<tls::Server>>,
    pub(super) settings: Advanced,
    pub(super) metrics: Metrics,
    pub(super) trees: OnceLock<TreeHandler>,
    /// Until when other replicas are expected though no address is known yet; `None` if none are listed.
    expected_until: Option<Instant>,
    fleet: Arc<Registry>,
    routed: Arc<RoutedPrompts>,
    /// Other replicas are expected, and none is connected.
    is_alone: AtomicBool,
    /// Other replicas that are connected and not silent.
    connected: AtomicU32,
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
    streams: Streams,
    /// All listed addresses.
    addresses: BTreeMap<Arc<str>, AddressState>,
    /// Another replica has been connected before.
    was_connected: bool,
    workers: Workers,
    /// What the log says of the replicas, of their addresses, and of being alone.
    replicas_said: Said<InstanceId>,
    addresses_said: Said<Arc<str>>,
    alone_said: Said<()>,
    wakes: Wakes,
}

/// A replica that was silent is said to be connected again once it was not for so many times what makes it stale.
const CALM: u32 = 10;

/// A DNS name that has not been resolved by then is not waited for.
const FIRST_LOOK: Duration = Duration::from_secs(2);

/// Replicas that could be asked for their trees.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TreeSources {
    /// `HOST:PORT` of each replica that is connected, ready and not draining.
    pub ready: Vec<Arc<str>>,
    /// Another may soon be known to be ready: an address was not tried yet, or a connected replica has not reported.
    pub may_grow: bool,
}

impl State {
    pub(super) fn new(
        now: Instant,
        identity: Identity,
        tls: Option<Arc<tls::Server>>,
        settings: &Settings,
        fleet: Arc<Registry>,
        routed: Arc<RoutedPrompts>,
        metrics: Metrics,
    ) -> Arc<Self> {
        let is_listed = !settings.discovery.is_empty();
        let settings = settings.advanced.clone();
        let roster = Roster::new(
            identity.id,
            settings.stale_after,
            settings.dead_after,
            settings.max_peers as usize,
        );
        let calm = settings.stale_after * CALM;
        fleet.waiting().set_shared();
        Arc::new(Self {
            inner: Mutex::new(Inner {
                gauges: Gauges::new(now, settings.heartbeat_interval),
                roster,
                table: LoadTable::new(settings.max_workers as usize),
                streams: Streams::default(),
                addresses: BTreeMap::new(),
                was_connected: false,
                workers: Workers::default(),
                replicas_said: Said::new(calm),
                addresses_said: Said::new(calm),
                alone_said: Said::new(calm),
                wakes: Wakes::default(),
            }),
            tls,
            identity: Arc::new(identity),
            settings,
            metrics,
            trees: OnceLock::new(),
            expected_until: is_listed.then(|| now + FIRST_LOOK),
            fleet,
            routed,
            is_alone: AtomicBool::new(false),
            connected: AtomicU32::new(0),
            is_ready: AtomicBool::new(false),
            is_draining: AtomicBool::new(false),
            version: watch::Sender::new(0),
        })
    }

    pub(super) fn is_alone(&self) -> bool {
        self.is_alone.load(Relaxed)
    }

    pub(super) fn connected(&self) -> u32 {
        self.connected.load(Relaxed)
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
                // One that was lost is said to be connected again when it stays.
                if !inner.replicas_said.is_bad(&peer.id) {
                    info!(peer = %peer.name, id = %peer.id, release = %peer.release, "replica connected");
                }
                stream
            }
            Admission::Replaces { stream, former } => {
                inner.streams.retire(now, former);
                stream
            }
            Admission::Duplicate => return Err("it is connected by another stream"),
            Admission::Full => {
                self.metrics.refused.with_label_values(&["full"]).inc();
                return Err("too many replicas");
            }
        };
        inner.table.on_stream(peer.id);
        self.refresh_fleet(now, inner);
        if inner.streams.is_empty() {
            // Nothing was reported while nobody listened, so what was reported last may be old.
            self.report_own(now, inner);
        }
        let whole = || inner.gauges.whole();
        let end = inner
            .streams
            .open(stream, outgoing.clone(), &self.metrics, whole);
        for speeds in inner.workers.learnt_speeds() {
            inner.streams.send_once(&self.metrics, &speeds);
        }
        inner.was_connected = true;
        self.routed.set_connected(true);
        self.fleet.waiting().set_heard(true);
        self.routed.on_missed(now);
        self.update_alone(now, inner);
        self.version.send_modify(|version| *version += 1);
        Ok((stream, end))
    }

    /// A stream has ended, for whatever reason.
    pub(super) fn close(&self, now: Instant, peer: InstanceId, stream: StreamId, reason: &str) {
        let inner = &mut *self.inner.lock();
        inner.streams.remove(stream);
        let is_connected = !inner.streams.is_empty();
        self.routed.set_connected(is_connected);
        self.fleet.waiting().set_heard(is_connected);
        let Some(lost) = inner.roster.on_end(peer, stream) else {
            return;
        };
        inner.table.remove(peer);
        self.apply(now, inner, false);
        let name = &lost.identity.name;
        if lost.condition.is_draining {
            self.metrics.lost.with_label_values(&["drained"]).inc();
            inner.replicas_said.forget(&peer);
            info!(peer = %name, id = %peer, "replica has drained and left");
        } else {
            let is_silent =
                now.saturating_duration_since(lost.received_at) >= self.settings.dead_after;
            let kind = if is_silent { "silent" } else { "closed" };
            self.metrics.lost.with_label_values(&[kind]).inc();
            // At the end of its own drain this replica closes each stream: the others are not lost.
            let is_own_end = self.is_draining.load(Relaxed);
            let said = &mut inner.replicas_said;
            if !is_own_end && said.observe(now, &peer, Level::Lost).is_some() {
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
        self.metrics.on_received(bytes);
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
                let applied = inner.table.on_report(now, peer, &report);
                self.metrics.ignored.inc_by(applied.ignored.into());
                let condition = Condition {
                    is_ready: report.is_ready,
                    is_draining: report.is_draining,
                };
                inner.roster.set_condition(peer, condition);
                self.refresh_fleet(now, inner);
                self.apply(now, inner, applied.is_first);
            }
            Some(Kind::Routed(message)) => {
                self.refresh_fleet(now, inner);
                let workers = inner.workers.routed_workers(&inner.table, peer, &message);
                // Blocks are placed without the lock, which pages take too.
                drop(guard);
                let worker_of = |number| workers.get(&number).copied();
                self.routed.apply(now, &message, worker_of);
            }
            Some(Kind::LearntSpeeds(message)) => {
                self.refresh_fleet(now, inner);
                inner.workers.take_speeds(&message);
            }
            // Handshakes and trees have their own places.
            Some(Kind::Hello(_) | Kind::Proof(_) | Kind::TreeRequest(_) | Kind::TreeChunk(_)) => {}
            // Of a later release.
            None => self.metrics.ignored.inc(),
        }
    }

    /// What changed of this replica's own load since the last report.
    fn report_own(&self, now: Instant, inner: &mut Inner) -> Vec<Bytes> {
        let waiting = self.fleet.waiting().own();
        let loads = inner.workers.own_loads(waiting.as_deref());
        inner.gauges.report(now, self.condition(), loads)
    }

    /// Reports to all streams what changed, and looks for replicas that fell silent.
    /// True if there was something to report.
    pub(super) fn tick(&self, now: Instant) -> bool {
        let inner = &mut *self.inner.lock();
        self.refresh_fleet(now, inner);
        let messages = self.report_own(now, inner);
        let routed = inner
            .workers
            .routed_message(&self.routed, &inner.gauges.numbers);
        let is_sent = !messages.is_empty() || routed.is_some();
        let whole = || inner.gauges.whole();
        inner.streams.send(&self.metrics, &messages, whole);
        if let Some(routed) = routed
            && !inner.streams.send_once(&self.metrics, &routed)
        {
            self.routed.on_missed(now);
        }
        inner.streams.end_retired(now);
        for stream in inner.roster.dead(now) {
            inner.streams.end(stream);
        }
        Self::say_silent(now, inner);
        self.update_alone(now, inner);
        is_sent
    }

    /// Logs who fell silent, and who is not silent any more.
    fn say_silent(now: Instant, inner: &mut Inner) {
        for peer in inner.roster.peers() {
            let (id, name) = (peer.identity.id, &peer.identity.name);
            let level = match inner.roster.freshness(now, peer) {
                Freshness::Connected => Level::Well,
                Freshness::Stale => Level::Poor,
            };
            match inner.replicas_said.observe(now, &id, level) {
                Some(Level::Well) => info!(peer = %name, %id, "replica is connected again"),
                Some(_) => {
                    warn!(peer = %name, %id, "replica is silent; its last load still counts")
                }
                None => {}
            }
        }
    }

    fn condition(&self) -> Condition {
        Condition {
            is_ready: self.is_ready.load(Relaxed),
            is_draining: self.is_draining.load(Relaxed),
        }
    }

    /// Whether a request was routed that the others do not know of yet.
    pub(super) fn has_routed(&self) -> bool {
        self.routed.has_queued()
    }

    /// How many replicas are reported to.
    pub(super) fn streams(&self) -> usize {
        self.inner.lock().streams.len()
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
        self.inner.lock().streams.remove(stream);
    }

    /// Keeps only the listed addresses.
    pub(super) fn set_addresses(&self, now: Instant, listed: impl Fn(&str) -> bool) {
        let inner = &mut *self.inner.lock();
        inner.addresses.retain(|address, _| listed(address));
        self.update_alone(now, inner);
    }

    pub(super) fn set_address(&self, now: Instant, address: &Arc<str>, state: AddressState) {
        let inner = &mut *self.inner.lock();
        inner.addresses.insert(address.clone(), state);
        self.update_alone(now, inner);
    }

    /// True if the log should say how it is with an address now.
    pub(super) fn says_address(&self, now: Instant, address: &Arc<str>, level: Level) -> bool {
        let inner = &mut *self.inner.lock();
        let said = inner.addresses_said.observe(now, address, level);
        said.is_some_and(|level| level > Level::Well)
    }

    /// The replicas that could be asked for their trees. Both answers are of one moment, so that none that reports
    /// meanwhile is left out of both.
    pub(super) fn tree_sources(&self, now: Instant) -> TreeSources {
        let inner = self.inner.lock();
        let is_asked = |peer: &&Peer| {
            let is_fresh = inner.roster.freshness(now, peer) == Freshness::Connected;
            is_fresh && peer.condition.is_ready && !peer.condition.is_draining
        };
        let ready = inner.roster.peers().filter(is_asked);
        let ready = ready.filter_map(|peer| peer.address.clone()).collect();
        let mut addresses = inner.addresses.values();
        let mut peers = inner.roster.peers();
        let has_reported = |peer: InstanceId| inner.table.has_reported(peer);
        let is_early = self.expected_until.is_some_and(|until| now < until);
        let is_unlooked = is_early && inner.addresses.is_empty();
        let may_grow = is_unlooked
            || addresses.any(|state| match state {
                AddressState::Connecting => true,
                // Its stream may not be open yet.
                AddressState::Connected(peer) => !has_reported(*peer),
                _ => false,
            })
            || peers.any(|peer| !has_reported(peer.identity.id));
        TreeSources { ready, may_grow }
    }

    pub(super) fn status(&self, now: Instant) -> Status {
        let inner = self.inner.lock();
        let is_listed = |address: &str| inner.workers.is_listed(address);
        let rows = status::rows(
            now,
            &inner.roster,
            &inner.table,
            &inner.addresses,
            is_listed,
        );
        let replica = ReplicaRow {
            name: self.identity.name.to_string(),
            instance_id: self.identity.id.to_string(),
            is_alone: self.is_alone(),
        };
        Status {
            replica,
            peers: rows,
        }
    }

    /// What each other replica has at a worker.
    pub(super) fn loads(&self, address: &str) -> Vec<LoadRow> {
        let inner = self.inner.lock();
        status::load_rows(&inner.roster, &inner.table, address)
    }

    /// Sets the gauges that are read only when a page is read.
    pub(super) fn update_metrics(&self, now: Instant) {
        self.metrics.show(&self.status(now));
    }

    /// Takes over a change of the fleet: who its workers are, and what others have there.
    fn refresh_fleet(&self, now: Instant, inner: &mut Inner) {
        if inner.workers.refresh(&self.fleet) {
            let workers = &mut inner.workers;
            inner
                .gauges
                .forget(now, |address| workers.may_have_load(address));
            workers.number_ranks(now, &mut inner.gauges.numbers);
            workers.set_all(now, &inner.table, &self.fleet);
        }
    }

    /// Writes changed sums to where routing reads them, and wakes who waits here: a worker may have room now, or no
    /// other replica's request is before theirs any more. `is_first`: a replica has just connected, whose requests the
    /// engines had reported as foreign.
    fn apply(&self, now: Instant, inner: &mut Inner, is_first: bool) {
        let Inner { workers, table, .. } = inner;
        let is_changed = workers.set_changed(now, table, is_first, &self.fleet);
        let freed = self.fleet.freed();
        if is_changed && freed.waiting() > 0 && inner.wakes.is_due(now) {
            freed.notify();
        }
    }

    fn update_alone(&self, now: Instant, inner: &mut Inner) {
        let is_fresh = |peer: &Peer| inner.roster.freshness(now, peer) == Freshness::Connected;
        let fresh = inner.roster.peers().filter(|peer| is_fresh(peer)).count();
        let mut addresses = inner.addresses.values();
        let is_alone = fresh == 0 && addresses.any(AddressState::is_replica_expected);
        let fresh = u32::try_from(fresh).unwrap_or(u32::MAX);
        self.connected.store(fresh, Relaxed);
        self.is_alone.store(is_alone, Relaxed);
        // A start is no loss, nor is the end of this replica's own drain.
        if !inner.was_connected || self.is_draining.load(Relaxed) {
            return;
        }
        let level = if is_alone { Level::Poor } else { Level::Well };
        match inner.alone_said.observe(now, &(), level) {
            Some(Level::Well) if fresh > 0 => info!("another replica is connected"),
            Some(Level::Well) => {
                info!("no other replica is expected: none is listed, or none listens");
            }
            Some(_) => warn!("no other replica is connected; routing without them"),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests;
