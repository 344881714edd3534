//! The Redis store itself: which thread and connection execute a request, and what operators see of Redis.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use serde_json::json;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use super::breakers::key_of_each_range;
use super::executor::Executor;
use super::failure::{BUSY_RETRY, refused_command, unavailable};
use super::keys::Keys;
use super::lacking::LackingCommands;
use super::link::{Link, SHARED};
use super::reply::Reply;
use super::request::{Kind, Request};
use super::scripts::{self, Call, Name};
use super::settings::{Mode, Settings};
use super::target::Target;
use crate::http::circuit_breaker::State;
use crate::http::io_threads::{self, OffloadThread};
use crate::observe;
use crate::observe::log_once::LogOnce;
use crate::observe::metrics::Registry;
use crate::store::meters::{Meters, Op};
use crate::store::outbox::Subscriptions;
use crate::store::{Error, Health, Report, ResponseStore, RetentionSettings, StoreFuture};

/// This many I/O threads have a connection of their own, which saves a change of threads for each operation; the others,
/// and all in a cluster, share one. A hundred replicas with 64 leave a third of the 10,000 clients that Redis accepts by
/// default.
const MAX_THREAD_CONNECTIONS: usize = 64;

#[derive(Debug)]
pub struct Redis {
    executor: Arc<Executor>,
    link: Arc<Link>,
    pub(super) keys: Keys,
    pub(super) keep: RetentionSettings,
    mode: Mode,
    /// The length of leases as of the last heartbeat; 0 before.
    pub(super) lease_ms: AtomicU64,
    /// Which endpoints learn of the end of background responses, by the latest configuration.
    pub(super) subscriptions: ArcSwap<Subscriptions>,
    /// The latest check whether Redis is out of memory.
    memory: Arc<MemoryCheck>,
    /// A key that never exists, of each range of slots that has a circuit breaker; none for a server.
    range_probes: Vec<String>,
    /// The latest check of a cluster's nodes.
    node_check: Mutex<Option<watch::Receiver<NodeCheck>>>,
    lacking: LackingCommands,
    pub(super) meters: Meters,
    /// The thread of the shared connection. It ends with the store.
    own_thread: OffloadThread,
    /// Compresses and decompresses large values. Its queue has at most one value per operation.
    pub(super) compression_thread: OffloadThread,
    /// Why documents were left out of lists.
    pub(super) left_out: Mutex<LogOnce>,
    /// Why events of webhooks were left in the outbox.
    pub(super) left_in_outbox: Mutex<LogOnce>,
}

pub(super) fn closing() -> Error {
    Error::Unknown {
        retry_after: Duration::from_secs(1),
        reason: "the store is closing".into(),
    }
}

impl ResponseStore for Redis {
    // Checks that Redis answers and takes writes: once a second while it does. The write changes nothing, and needs
    // memory: a server that is out of memory refuses it before anything is generated that could not be stored.
    fn admit(&self) -> StoreFuture<'_, ()> {
        self.meters.meter(Op::Admit, move || async move {
            self.check_commands().await?;
            if self.is_cluster() {
                return self.check_nodes().await;
            }
            if self.executor.is_fresh() && !self.memory.is_due() {
                return self.memory.last();
            }
            // As large as what did not fit: Redis counts a request that it reads, and a small one may fit where no record does.
            let room = vec![0_u8; self.memory.room()];
            let write = Request::command("ZADD", (self.keys.owners(), "XX", 0, room));
            let result = self.execute(Kind::Write, write).await;
            self.memory.on_checked(&result);
            result.map(drop)
        })
    }

    fn health(&self) -> Health {
        let is_up = self.is_up();
        Health {
            is_up,
            reason: if is_up {
                String::new()
            } else {
                self.executor.last_failure().to_string()
            },
            warning: match &*self.lacking.said() {
                "" => self.link.warning(),
                lacking => lacking.to_owned(),
            },
        }
    }

    fn report(&self) -> StoreFuture<'_, Report> {
        self.meters.meter(Op::Report, move || async move {
            let (owners, orphans) = self.report_owners().await.unwrap_or_default();
            let mut server = serde_json::Map::new();
            let (command, wanted): (&[&str], &[&str]) = match self.mode {
                Mode::Cluster => (
                    &["CLUSTER", "INFO"],
                    &["cluster_state", "cluster_slots_ok", "cluster_known_nodes"],
                ),
                Mode::Standalone | Mode::Sentinel => (
                    &["INFO"],
                    &[
                        "redis_version",
                        "used_memory",
                        "maxmemory",
                        "maxmemory_policy",
                        "connected_clients",
                        "role",
                    ],
                ),
            };
            let info = Request::command(command[0], &command[1..]);
            if let Ok(value) = self.execute(Kind::Read, info).await
                && let Ok(text) = redis::from_redis_value::<String>(value)
            {
                let lines = text.lines().filter_map(|line| line.split_once(':'));
                for (key, value) in lines.filter(|(key, _)| wanted.contains(key)) {
                    server.insert(key.to_owned(), value.into());
                }
            }
            // What the health warns of is as of now.
            let _ = self.check_eviction().await;
            Ok(Report {
                kind: "redis",
                health: self.health(),
                details: json!({
                    "mode": self.mode,
                    "circuit_breaker": self.executor.breakers.state().as_str(),
                    "connections_opened": self.link.opened(),
                    "in_flight": self.executor.in_flight.load(Relaxed),
                    "server": server,
                    "owners": owners,
                    "orphans": orphans,
                    "scripts": scripts::report(),
                }),
            })
        })
    }
}

impl Redis {
    /// Starts the store's thread. It connects at the first operation, so a router starts while Redis is down.
    pub fn open(
        settings: &Settings,
        keep: &RetentionSettings,
        io_threads: usize,
        registry: &Registry,
    ) -> io::Result<Self> {
        let meters = Meters::new(registry);
        let target = Target::new(settings).map_err(io::Error::other)?;
        let own = match settings.mode {
            // The cluster client has its own connection to each node.
            Mode::Cluster => 0,
            Mode::Standalone | Mode::Sentinel => io_threads.min(MAX_THREAD_CONNECTIONS),
        };
        let keys = Keys::new(&settings.prefix);
        let range_probes = match settings.mode {
            Mode::Cluster => key_of_each_range(|number| keys.probe(number)),
            Mode::Standalone | Mode::Sentinel => Vec::new(),
        };
        let link = Link::new(target, own, range_probes.clone(), &meters);
        let link = Arc::new(link);
        Ok(Self {
            executor: Arc::new(Executor::new(link.clone(), settings, meters.clone())),
            link,
            keys,
            keep: keep.clone(),
            mode: settings.mode,
            lease_ms: AtomicU64::new(0),
            subscriptions: ArcSwap::default(),
            memory: Arc::default(),
            range_probes,
            node_check: Mutex::default(),
            lacking: LackingCommands::default(),
            meters,
            own_thread: OffloadThread::start("redis")?,
            compression_thread: OffloadThread::start("redis-values")?,
            left_out: Mutex::default(),
            left_in_outbox: Mutex::default(),
        })
    }

    /// Starts a request on the store's thread, over the connection with this index. Returns its result; who drops that
    /// does not cancel the request.
    pub(super) fn spawn(
        &self,
        index: usize,
        kind: Kind,
        request: Request,
    ) -> impl Future<Output = Result<redis::Value, Error>> + use<> {
        let executor = self.executor.clone();
        let result = async move { executor.execute(index, kind, &request).await };
        let result = self.own_thread.runtime().spawn(result);
        async move { result.await.unwrap_or_else(|_| Err(closing())) }
    }

    /// Executes a request on the calling I/O thread if it has a connection, else on the store's thread.
    pub(super) async fn execute(
        &self,
        kind: Kind,
        request: Request,
    ) -> Result<redis::Value, Error> {
        let bytes = request.bytes_sent();
        let result = match self.link.index_for(io_threads::index()) {
            SHARED => self.spawn(SHARED, kind, request).await,
            own => self.executor.execute(own, kind, &request).await,
        };
        self.memory.on_result(&result, bytes);
        result
    }

    pub(super) async fn call(&self, kind: Kind, call: Call) -> Result<Reply, Error> {
        Reply::new(self.execute(kind, Request::Script(call)).await?)
    }

    /// As [`Self::call`], for a write that clients rely on once it is acknowledged: it waits for replicas of Redis
    /// if the settings say so.
    pub(super) async fn call_replicated(&self, kind: Kind, call: Call) -> Result<Reply, Error> {
        if self.executor.replica_wait.is_none() {
            return self.call(kind, call).await;
        }
        let request = Request::Script(call);
        let bytes = request.bytes_sent();
        let result = self.spawn(self.link.waiting(), kind, request).await;
        self.memory.on_result(&result, bytes);
        Reply::new(result?)
    }

    /// Sends a command without waiting for it: a later scan makes up for its failure.
    pub(super) fn send_detached(&self, request: Request) {
        drop(self.spawn(SHARED, Kind::Write, request));
    }

    pub(super) fn record_ttl_ms(&self) -> u64 {
        self.keep.responses.as_millis() as u64
    }

    pub(super) fn is_cluster(&self) -> bool {
        self.mode == Mode::Cluster
    }

    /// Whether any node of a cluster replies and takes writes. Checked once a second while one replies, and at once
    /// after a write to a full one, which may be the only one. A node that is down or full refuses only its own keys.
    async fn check_nodes(&self) -> Result<(), Error> {
        let is_due = self.memory.is_due();
        if !is_due && self.executor.has_replied_lately() && self.memory.is_as_checked() {
            return self.memory.last();
        }
        let mut check = self.running_check()?;
        let ended = check.wait_for(|check| check.found.is_some()).await;
        // Without a result the store's thread has ended.
        let found = ended.ok().and_then(|check| check.found.clone());
        found.unwrap_or_else(|| Err(closing()))
    }

    /// Asks nodes of a cluster whether they reply, at each heartbeat those of the next ranges of slots: the circuit
    /// breaker of a range learns it though no request comes.
    pub(super) fn probe_next_ranges(&self) {
        let ranges = self.executor.breakers.next_ranges();
        // Small reads, at most one for each range, and none where the circuit breaker is open.
        let keys = ranges
            .into_iter()
            .filter_map(|range| self.range_probes.get(range));
        for key in keys {
            let read = Request::command("HMGET", (key.as_str(), "v"));
            drop(self.spawn(SHARED, Kind::Read, read));
        }
    }

    /// The check of a cluster's nodes that runs, or a new one: in an outage all requests wait for one. Once no node
    /// replies only one request waits for each check, as with the circuit breaker of a server; the others are refused.
    fn running_check(&self) -> Result<watch::Receiver<NodeCheck>, Error> {
        let mut latest = self.node_check.lock();
        if let Some(check) = &*latest
            && !check.borrow().is_over
        {
            if self.executor.breakers.state() == State::Open {
                return Err(unavailable(BUSY_RETRY, &self.executor.last_failure()));
            }
            return Ok(check.clone());
        }
        let (sender, check) = watch::channel(NodeCheck::default());
        let asked = ask_nodes(
            self.executor.clone(),
            self.memory.clone(),
            self.keys.probes(),
            sender,
        );
        // Bounded by the deadlines of its operations. Who asked first may leave before the others.
        drop(self.own_thread.runtime().spawn(asked));
        *latest = Some(check.clone());
        Ok(check)
    }

    /// Checks now and then which commands are refused. An error names them.
    async fn check_commands(&self) -> Result<(), Error> {
        if self.lacking.is_due() {
            let call = Call::new(Name::LACKING).key(self.keys.lacking());
            let mut refused = Vec::new();
            match self.call(Kind::Read, call).await {
                Ok(mut reply) => {
                    while !reply.is_empty() {
                        refused.push((reply.word()?, reply.word()?));
                    }
                }
                // The script itself may be what is refused.
                Err(error) => {
                    let reason = match &error {
                        Error::Unavailable { reason, .. } => &**reason,
                        _ => "",
                    };
                    match refused_command(reason) {
                        Some(name) => refused.push((name, reason.to_owned())),
                        // One node of a cluster failed; the next check asks several.
                        None if self.is_cluster() => return self.lacking.check(),
                        None => return Err(error),
                    }
                }
            }
            self.lacking.on_checked(&refused);
        }
        self.lacking.check()
    }

    /// Looks whether Redis may evict keys, also if the returned is dropped.
    pub(super) fn check_eviction(&self) -> JoinHandle<()> {
        let link = self.link.clone();
        let check = async move {
            if let Some(connection) = link.up(SHARED) {
                link.check_eviction(connection.wire).await;
            }
        };
        self.own_thread.runtime().spawn(check)
    }

    pub(super) fn is_up(&self) -> bool {
        self.executor.breakers.state() != State::Open
    }
}

/// A check of a cluster's nodes.
#[derive(Debug, Default)]
struct NodeCheck {
    /// `None` until a node takes the write, or none has.
    found: Option<Result<(), Error>>,
    /// Whether each node has replied, or has not in time. No other check begins before: the writes of one check are
    /// under way at a time.
    is_over: bool,
}

/// Asks the node of each of these keys for a write as large as what did not fit. One that takes it is enough for those
/// that wait. The other replies are read all the same, for the circuit breakers of their ranges.
async fn ask_nodes(
    executor: Arc<Executor>,
    memory: Arc<MemoryCheck>,
    probes: [String; 4],
    check: watch::Sender<NodeCheck>,
) {
    let check = Arc::new(check);
    let mut asked = JoinSet::new();
    for key in probes {
        let executor = executor.clone();
        // Changes nothing: there is no such key.
        let write = Request::command("ZADD", (key, "XX", 0, vec![0_u8; memory.room()]));
        let waiting = check.clone();
        // The store has one receiver itself.
        let waiting = move || waiting.receiver_count().saturating_sub(1);
        asked.spawn(async move {
            executor
                .execute_for(SHARED, Kind::Write, &write, waiting)
                .await
        });
    }
    let on_found = |found: Result<(), Error>| {
        memory.on_checked(&found);
        check.send_modify(|check| check.found = Some(found));
    };
    let (mut is_taken, mut refusal) = (false, closing());
    while let Some(reply) = asked.join_next().await {
        match reply {
            Ok(Ok(_)) if !is_taken => {
                is_taken = true;
                on_found(Ok(()));
            }
            // A full node is up: that says more than one that is down.
            Ok(Err(error)) if !matches!(refusal, Error::Full { .. }) => refusal = error,
            Ok(_) | Err(_) => {}
        }
    }
    if !is_taken {
        on_found(Err(refusal));
    }
    check.send_modify(|check| check.is_over = true);
}

/// Whether Redis is out of memory, as of the last check.
#[derive(Debug)]
struct MemoryCheck {
    started: Instant,
    /// Milliseconds after `started`, plus one; 0 for never.
    checked_ms: AtomicU64,
    is_full: AtomicBool,
    /// Whether the last check said that it is full. One write to a cluster says so of one node.
    was_found_full: AtomicBool,
    /// The largest write that has not fitted since it was known to be full.
    refused_bytes: AtomicU64,
}

/// Time between two checks while Redis answers.
const MEMORY_CHECK_MS: u64 = 1_000;

/// The most that a check asks Redis to have room for.
const ROOM_BYTES_MAX: u64 = 1 << 20;

impl Default for MemoryCheck {
    fn default() -> Self {
        Self {
            started: observe::now(),
            checked_ms: AtomicU64::new(0),
            is_full: AtomicBool::new(false),
            was_found_full: AtomicBool::new(false),
            refused_bytes: AtomicU64::new(0),
        }
    }
}

impl MemoryCheck {
    /// Whether the caller is the one that must check now.
    fn is_due(&self) -> bool {
        let now = self.started.elapsed().as_millis() as u64 + 1;
        let due = |last: u64| (last == 0 || now >= last + MEMORY_CHECK_MS).then_some(now);
        self.checked_ms.fetch_update(Relaxed, Relaxed, due).is_ok()
    }

    fn on_checked<T>(&self, result: &Result<T, Error>) {
        let is_full = match result {
            Ok(_) => false,
            Err(Error::Full { .. }) => true,
            Err(_) => return,
        };
        if !is_full {
            self.refused_bytes.store(0, Relaxed);
        }
        self.was_found_full.store(is_full, Relaxed);
        self.is_full.store(is_full, Relaxed);
    }

    /// Any write says that Redis is full. Only a check says that it is not.
    fn on_result<T>(&self, result: &Result<T, Error>, bytes: u64) {
        if let Err(Error::Full { .. }) = result {
            self.refused_bytes
                .fetch_max(bytes.min(ROOM_BYTES_MAX), Relaxed);
            self.is_full.store(true, Relaxed);
        }
    }

    /// Bytes that a check must find room for.
    fn room(&self) -> usize {
        self.refused_bytes.load(Relaxed) as usize
    }

    /// False from when a write did not fit, where the last check had found room, until the next check.
    fn is_as_checked(&self) -> bool {
        !self.is_full.load(Relaxed) || self.was_found_full.load(Relaxed)
    }

    fn last(&self) -> Result<(), Error> {
        if self.is_full.load(Relaxed) {
            Err(Error::Full {
                retry_after: BUSY_RETRY,
            })
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_that_does_not_fit_asks_for_a_check_unless_the_last_one_found_no_room() {
        let full: Result<(), Error> = Err(Error::Full {
            retry_after: BUSY_RETRY,
        });
        let memory = MemoryCheck::default();
        let state = || (memory.is_as_checked(), memory.last().is_ok());
        assert_eq!(state(), (true, true));
        memory.on_result(&full, 9);
        assert_eq!((state(), memory.room()), ((false, false), 9));
        memory.on_checked(&full);
        memory.on_result(&full, 5);
        assert_eq!((state(), memory.room()), ((true, false), 9));
        // What could not be asked is no answer.
        memory.on_checked::<()>(&Err(closing()));
        assert_eq!(state(), (true, false));
        memory.on_checked(&Ok(()));
        assert_eq!((state(), memory.room()), ((true, true), 0));
    }
}
