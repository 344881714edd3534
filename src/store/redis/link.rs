//! The connections to Redis, each opened when it is needed and reopened when it is lost: one per I/O thread
//! (run on that thread), and a shared one.

use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use prometheus::{IntCounter, IntGauge};
use redis::{RedisError, Value};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tracing::{debug, info, warn};

use super::target::{Target, Wire};
use super::timer_anchor::TimerAnchor;
use crate::observe;
use crate::store::meters::Meters;

/// The index of the shared connection.
pub(super) const SHARED: usize = 0;
/// A connection is replaced after this many time-outs in a row. A single one may be due to one slow command.
const TIMEOUTS_MAX: u32 = 3;
/// The policy under which Redis drops nothing.
const NO_EVICTION: &str = "noeviction";
/// How long an I/O thread uses the shared connection after its own could not be opened: Redis may have reached
/// its limit of clients.
const OWN_RETRY: Duration = Duration::from_secs(1);

#[derive(Clone)]
enum State {
    /// Not used since it was lost.
    Idle,
    Connecting {
        /// Whether the previous attempt failed.
        is_retry: bool,
    },
    Up(Connection),
    /// The last attempt failed. The next use starts another one.
    Failed {
        reason: Arc<str>,
        at: Instant,
    },
}

struct Slot {
    state: Mutex<State>,
    /// Incremented by each change of the state.
    changed: watch::Sender<u64>,
    /// Time-outs in a row.
    timeouts: AtomicU32,
    /// Whether a connection with a new password is being opened.
    is_renewing: AtomicBool,
    anchor: Arc<TimerAnchor>,
}

pub(super) struct Link {
    target: Target,
    timeout: Duration,
    /// The shared connection, then the one of each I/O thread, then the one of writes that wait for replicas.
    slots: Vec<Slot>,
    /// I/O threads with a connection of their own.
    own: usize,
    opened: AtomicU64,
    /// Generations of connections: how often all were lost, plus one. The first connection of a generation is
    /// logged.
    generation: AtomicU64,
    logged_generation: AtomicU64,
    connects: IntCounter,
    /// Keys of which a cluster's connections are asked whether their nodes reply: one of each range of slots.
    probes: Vec<String>,
    /// What is wrong with the server's settings, for operators; empty for nothing.
    warning: Mutex<String>,
    may_evict: IntGauge,
}

impl State {
    fn is_up(&self, number: u64) -> bool {
        matches!(self, Self::Up(current) if current.number == number)
    }
}

impl Slot {
    /// Drops the connection with this number if it is lost. False if it stays, or was replaced already.
    fn replace(&self, number: u64, is_lost: impl FnOnce() -> bool) -> bool {
        let mut state = self.state.lock();
        let is_replaced = state.is_up(number) && is_lost();
        if is_replaced {
            *state = State::Idle;
        }
        is_replaced
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link")
            .field("target", &self.target)
            .finish_non_exhaustive()
    }
}

/// A connection, and a number that its successors in the same slot do not have.
#[derive(Clone)]
pub(super) struct Connection {
    pub(super) wire: Wire,
    pub(super) number: u64,
    /// See [`Target::connect`].
    passwords_replaced: u64,
}

impl Link {
    /// With own connections for the first `own` I/O threads.
    pub(super) fn new(target: Target, own: usize, probes: Vec<String>, meters: &Meters) -> Self {
        let slot = |_| Slot {
            state: Mutex::new(State::Idle),
            changed: watch::Sender::new(0),
            timeouts: AtomicU32::new(0),
            is_renewing: AtomicBool::new(false),
            anchor: Arc::default(),
        };
        Self {
            timeout: target.connect_timeout(),
            target,
            slots: (0..own + 2).map(slot).collect(),
            own,
            opened: AtomicU64::new(0),
            generation: AtomicU64::new(1),
            logged_generation: AtomicU64::new(0),
            connects: meters.metrics.reconnects.clone(),
            probes,
            warning: Mutex::default(),
            may_evict: meters.metrics.may_evict.clone(),
        }
    }

    /// The connection that an I/O thread uses; 0 is not an I/O thread. The shared one while its own cannot be
    /// opened.
    pub(super) fn index_for(&self, io_thread: usize) -> usize {
        if io_thread > self.own {
            return SHARED;
        }
        let slot = &self.slots[io_thread];
        let uses_shared = match &*slot.state.lock() {
            State::Failed { at, .. } => observe::now().saturating_duration_since(*at) < OWN_RETRY,
            State::Connecting { is_retry } => *is_retry,
            State::Idle | State::Up(_) => false,
        };
        if uses_shared { SHARED } else { io_thread }
    }

    /// The index of the connection for writes that wait for replicas of Redis. Opened at its first use.
    pub(super) fn waiting(&self) -> usize {
        self.own + 1
    }

    /// An operation begins on the thread of this connection.
    pub(super) fn hold_timer(&self, index: usize) {
        self.slots[index].anchor.hold();
    }

    /// The connection with this index, if it is open.
    pub(super) fn up(&self, index: usize) -> Option<Connection> {
        match &*self.slots[index].state.lock() {
            State::Up(connection) => Some(connection.clone()),
            State::Idle | State::Connecting { .. } | State::Failed { .. } => None,
        }
    }

    /// The connection with this index, opened if necessary. An attempt continues if its caller gives up. Must
    /// be called on the runtime that will run the connection's tasks.
    pub(super) async fn wire(self: &Arc<Self>, index: usize) -> Result<Connection, Arc<str>> {
        let Slot { state, changed, .. } = &self.slots[index];
        let mut changed = changed.subscribe();
        let mut has_waited = false;
        loop {
            changed.mark_unchanged();
            let begins = {
                let mut state = state.lock();
                match &*state {
                    State::Up(connection) => return Ok(connection.clone()),
                    State::Failed { reason, .. } if has_waited => return Err(reason.clone()),
                    State::Connecting { .. } => false,
                    State::Idle | State::Failed { .. } => {
                        let is_retry = matches!(&*state, State::Failed { .. });
                        *state = State::Connecting { is_retry };
                        true
                    }
                }
            };
            if begins {
                let link = self.clone();
                // Bounded by its deadline, and by the runtime's end.
                drop(tokio::runtime::Handle::current().spawn(link.connect(index)));
            }
            has_waited = true;
            // The sender lives as long as `self`.
            let _ = changed.changed().await;
        }
    }

    async fn connect(self: Arc<Self>, index: usize) {
        let mut unchecked = None;
        let state = match self.open(index).await {
            Ok(connection) => {
                let generation = self.generation.load(Relaxed);
                if self.logged_generation.swap(generation, Relaxed) == generation {
                    debug!(target = ?self.target, index, "connected to Redis");
                } else {
                    info!(target = ?self.target, "connected to Redis");
                    unchecked = Some(connection.wire.clone());
                }
                State::Up(connection)
            }
            Err(reason) => State::Failed {
                reason,
                at: observe::now(),
            },
        };
        let slot = &self.slots[index];
        *slot.state.lock() = state;
        slot.changed.send_modify(|number| *number += 1);
        // Only now: all masters of a cluster are asked, and one that hangs delays no operation on the others.
        if let Some(wire) = unchecked {
            self.check_eviction(wire).await;
        }
    }

    async fn open(&self, index: usize) -> Result<Connection, Arc<str>> {
        match tokio::time::timeout(self.timeout, self.target.connect()).await {
            Ok(Ok((wire, passwords_replaced))) => {
                self.slots[index].timeouts.store(0, Relaxed);
                let number = self.opened.fetch_add(1, Relaxed) + 1;
                self.connects.inc();
                Ok(Connection {
                    wire,
                    number,
                    passwords_replaced,
                })
            }
            Ok(Err(error)) => Err(error_text(&error).into()),
            Err(_) => Err("connecting timed out".into()),
        }
    }

    /// An operation failed on a connection to a cluster. The library opens lost ones to nodes anew, but with the
    /// password that the first ones had. If its file has another one, a connection with that takes the place of this
    /// one, once it reaches each node of the probes that this one reaches: servers that do not know the new password
    /// yet keep whom they let in with the old one, and the library connects where one node of the settings lets it in.
    pub(super) fn renew(self: &Arc<Self>, index: usize, connection: &Connection) {
        let (slot, number) = (&self.slots[index], connection.number);
        let replaced = connection.passwords_replaced;
        let is_due = self.target.is_password_due(observe::now());
        if !is_due || !slot.state.lock().is_up(number) {
            return;
        }
        if slot.is_renewing.swap(true, AcqRel) {
            return;
        }
        let (link, before) = (self.clone(), connection.wire.clone());
        let renew = async move {
            if link.target.has_new_password(replaced).await {
                link.replace(index, number, before).await;
            }
            link.slots[index].is_renewing.store(false, Release);
        };
        // Bounded by its deadlines, and by the runtime's end.
        drop(tokio::runtime::Handle::current().spawn(renew));
    }

    /// Opens a connection in the place of the one with this number, which stays if that reaches fewer nodes.
    async fn replace(&self, index: usize, number: u64, before: Wire) {
        let mut renewed = self.open(index).await;
        let wire = renewed.as_ref().ok().map(|renewed| renewed.wire.clone());
        if let Some(wire) = wire
            && !self.reaches_as_many(wire, before).await
        {
            renewed = Err("it does not reach all nodes that the one before reaches".into());
        }
        match renewed {
            Ok(connection) => {
                let mut state = self.slots[index].state.lock();
                if state.is_up(number) {
                    *state = State::Up(connection);
                }
            }
            Err(reason) => {
                debug!(%reason, "no connection to Redis with the new password; the one before stays");
            }
        }
    }

    /// Whether one connection to a cluster reaches each node of the probes that another one reaches.
    async fn reaches_as_many(&self, wire: Wire, other: Wire) -> bool {
        let missing = self.without_reply(wire, self.probes.clone()).await;
        let count = missing.len();
        self.without_reply(other, missing).await.len() == count
    }

    /// Those of these keys whose nodes do not reply over this connection.
    async fn without_reply(&self, wire: Wire, keys: Vec<String>) -> Vec<String> {
        let timeout = self.timeout;
        let mut asked = JoinSet::new();
        for key in keys {
            let mut wire = wire.clone();
            asked.spawn(async move {
                // Another node may be asked in place of one without a connection. It refuses a command with a key.
                let mut read = redis::cmd("HMGET");
                let reply =
                    tokio::time::timeout(timeout, wire.one(read.arg(key.as_str()).arg("v"))).await;
                (!matches!(reply, Ok(Ok(_)))).then_some(key)
            });
        }
        let mut missing = Vec::new();
        while let Some(unanswered) = asked.join_next().await {
            missing.extend(unanswered.ok().flatten());
        }
        missing
    }

    /// Warns if Redis may evict keys: responses, histories, or what says which replica runs what.
    pub(super) async fn check_eviction(&self, mut wire: Wire) {
        let mut info = redis::cmd("INFO");
        let reply = tokio::time::timeout(self.timeout, wire.one(info.arg("memory"))).await;
        // Some services refuse this command.
        let Ok(Ok(value)) = reply else { return };
        let Some(policy) = eviction_policy(value) else {
            return;
        };
        let may_evict = policy != NO_EVICTION;
        self.may_evict.set(may_evict.into());
        let warning = if may_evict {
            format!(
                "Redis may evict responses that are stored or running when its memory is full: set maxmemory-policy \
                 to noeviction (it is {policy})"
            )
        } else {
            String::new()
        };
        let mut known = self.warning.lock();
        if *known != warning {
            if may_evict {
                warn!(policy, "{warning}");
            } else {
                info!(policy, "Redis evicts no responses any more");
            }
            *known = warning;
        }
    }

    pub(super) fn warning(&self) -> String {
        self.warning.lock().clone()
    }

    /// A reply arrived in time.
    pub(super) fn on_answer(&self, index: usize) {
        let timeouts = &self.slots[index].timeouts;
        // Read first, so that nothing is written in the normal case.
        if timeouts.load(Relaxed) != 0 {
            timeouts.store(0, Relaxed);
        }
    }

    /// A reply timed out. A connection that times out repeatedly is replaced, the others are kept.
    pub(super) fn on_timeout(&self, index: usize, number: u64) {
        let slot = &self.slots[index];
        let is_lost = || slot.timeouts.fetch_add(1, Relaxed) + 1 >= TIMEOUTS_MAX;
        if slot.replace(number, is_lost) {
            warn!(
                connection = index,
                "a connection to Redis timed out repeatedly; it is replaced"
            );
        }
    }

    /// A reply belongs to another request, and so do all that follow on this connection.
    pub(super) fn on_foreign_reply(&self, index: usize, number: u64) {
        if self.slots[index].replace(number, || true) {
            warn!(
                connection = index,
                "a reply of Redis belongs to another request: a reply was lost or repeated between router and Redis; the connection is replaced"
            );
        }
    }

    /// Drops this connection and all others: a server that is gone, or no longer the master, affects all of
    /// them. Does nothing if the connection was replaced already.
    pub(super) fn lose(&self, index: usize, number: u64) {
        let is_current = self.slots[index].state.lock().is_up(number);
        if is_current {
            self.lose_all();
        }
    }

    pub(super) fn lose_all(&self) {
        self.generation.fetch_add(1, Relaxed);
        for slot in &self.slots {
            let mut state = slot.state.lock();
            if matches!(&*state, State::Up(_)) {
                *state = State::Idle;
            }
        }
    }

    pub(super) fn opened(&self) -> u64 {
        self.opened.load(Relaxed)
    }
}

/// The `maxmemory-policy` in a reply to `INFO`; `None` if there is none. A cluster replies with a text of each master:
/// this is a policy that evicts, if any master has one.
fn eviction_policy(reply: Value) -> Option<String> {
    let replies: Vec<Value> = match reply {
        Value::Map(masters) => masters.into_iter().map(|(_, reply)| reply).collect(),
        reply => vec![reply],
    };
    let policies = replies.into_iter().filter_map(|reply| {
        let text = redis::from_redis_value::<String>(reply).ok()?;
        let mut lines = text.lines();
        let policy = lines.find_map(|line| line.strip_prefix("maxmemory_policy:"))?;
        Some(policy.trim().to_owned())
    });
    policies.max_by_key(|policy| policy != NO_EVICTION)
}

pub(super) fn error_text(error: &RedisError) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.category()),
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(policy: &str) -> Value {
        let text =
            format!("# Memory\r\nmaxmemory:0\r\nmaxmemory_policy:{policy}\r\nmem_clients:1\r\n");
        Value::BulkString(text.into())
    }

    fn of_masters(replies: &[Value]) -> Value {
        let with_address = |reply: &Value| (Value::BulkString(b"a:1".to_vec()), reply.clone());
        Value::Map(replies.iter().map(with_address).collect())
    }

    #[test]
    fn the_policy_of_a_cluster_is_one_that_evicts_if_any_master_has_one() {
        let (safe, lru) = (info("noeviction"), info("allkeys-lru"));
        for (reply, expected) in [
            (safe.clone(), Some("noeviction")),
            (lru.clone(), Some("allkeys-lru")),
            (
                of_masters(&[safe.clone(), safe.clone()]),
                Some("noeviction"),
            ),
            (
                of_masters(&[lru.clone(), safe.clone()]),
                Some("allkeys-lru"),
            ),
            (
                of_masters(&[Value::Nil, safe.clone(), lru]),
                Some("allkeys-lru"),
            ),
            (of_masters(&[Value::Nil, safe]), Some("noeviction")),
            (of_masters(&[]), None),
            (Value::Nil, None),
            (Value::BulkString(b"maxmemory:0".to_vec()), None),
        ] {
            assert_eq!(
                eviction_policy(reply.clone()).as_deref(),
                expected,
                "{reply:?}"
            );
        }
    }
}
