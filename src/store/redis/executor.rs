//! Executes one operation against Redis: admission, sending, the deadline, one retry.
//!
//! A connection of the Redis library is a task. An I/O thread with a connection of its own runs that task itself;
//! otherwise the task runs on the store's thread.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use redis::{RedisResult, Value};
use tokio::task::yield_now;
use tokio::time::timeout_at;
use tracing::{info, warn};

use super::breakers::Breakers;
use super::failure::{
    BUSY_RETRY, Failure, classify, is_script_missing, server_failure, unavailable, unknown,
};
use super::keys::Keys;
use super::link::{Connection, Link, SHARED};
use super::replica_wait::ReplicaWait;
use super::request::{Kind, Request};
use super::scripts::Call;
use super::settings::{Mode, Settings};
use super::target::Wire;
use crate::http::circuit_breaker::State;
use crate::observe;
use crate::store::Error;
use crate::store::meters::Meters;

/// A reply this recent shows that Redis is up.
const FRESH: Duration = Duration::from_secs(1);
/// The time of the last reply is updated at most this often, because all I/O threads write to it.
const REPLY_TIME_GRANULARITY_MS: u64 = 50;

/// Added to a deadline for the bytes transferred: a tenth of 1 Gbit/s, because operations share the connection.
const BYTES_PER_MS: u64 = 12_500;

/// The state that all operations share.
#[derive(Debug)]
pub(super) struct Executor {
    link: Arc<Link>,
    pub(super) breakers: Breakers,
    pub(super) in_flight: AtomicU32,
    max_in_flight: u32,
    /// `None`: writes do not wait for replicas.
    pub(super) replica_wait: Option<ReplicaWait>,
    read_timeout: Duration,
    write_timeout: Duration,
    meters: Meters,
    last_failure: Mutex<Arc<str>>,
    started: Instant,
    /// Milliseconds from `started` to the last reply, plus one; 0 for none.
    last_reply_ms: AtomicU64,
}

impl Executor {
    pub(super) fn new(link: Arc<Link>, settings: &Settings, meters: Meters) -> Self {
        let probes = match settings.mode {
            Mode::Cluster => Vec::from(Keys::new(&settings.prefix).probes()),
            Mode::Standalone | Mode::Sentinel => Vec::new(),
        };
        Self {
            link,
            breakers: Breakers::new(
                &settings.advanced.circuit_breaker,
                &probes,
                meters.metrics.breaker.clone(),
            ),
            in_flight: AtomicU32::new(0),
            max_in_flight: settings.advanced.max_in_flight,
            replica_wait: ReplicaWait::new(&settings.wait, &meters),
            read_timeout: settings.advanced.read_timeout,
            write_timeout: settings.advanced.write_timeout,
            meters,
            last_failure: Mutex::new("".into()),
            started: observe::now(),
            last_reply_ms: AtomicU64::new(0),
        }
    }

    /// Whether Redis replied within the last second, and nothing has failed since.
    pub(super) fn is_fresh(&self) -> bool {
        self.has_replied_lately() && self.breakers.is_healthy()
    }

    /// Whether Redis, or any node of a cluster, replied within the last second.
    pub(super) fn has_replied_lately(&self) -> bool {
        let last_reply = self.last_reply_ms.load(Relaxed);
        let since = self.started.elapsed().as_millis() as u64;
        last_reply != 0 && since.saturating_sub(last_reply) < FRESH.as_millis() as u64
    }

    pub(super) fn last_failure(&self) -> Arc<str> {
        self.last_failure.lock().clone()
    }

    /// Executes a request. Must be polled on the thread of that connection.
    pub(super) fn execute(
        &self,
        index: usize,
        kind: Kind,
        request: &Request,
    ) -> impl Future<Output = Result<Value, Error>> {
        self.execute_for(index, kind, request, || 1)
    }

    /// As [`Self::execute`], for as many as `waiting` returns when it has failed: that counts as a failure of each.
    pub(super) async fn execute_for(
        &self,
        index: usize,
        kind: Kind,
        request: &Request,
        waiting: impl FnOnce() -> usize,
    ) -> Result<Value, Error> {
        let _in_flight = self
            .enter()
            .ok_or_else(|| unavailable(BUSY_RETRY, "too many operations are waiting for Redis"))?;
        self.breakers
            .admit(request, observe::now())
            // Clients' smallest unit is a second.
            .map_err(|wait| unavailable(wait.max(BUSY_RETRY), &self.last_failure()))?;
        let usual = match kind {
            Kind::Read => self.read_timeout,
            Kind::Write | Kind::WriteOnce => self.write_timeout,
        };
        self.link.hold_timer(index);
        let script = request.script();
        let shorter = script.and_then(|call| call.timeout);
        let timeout = shorter.unwrap_or(usual).min(usual);
        let transfer = script.map_or(0, Call::bytes) / BYTES_PER_MS;
        let transfer = Duration::from_millis(transfer);
        let deadline = tokio::time::Instant::now() + timeout + transfer;
        let mut result = self.attempt(index, kind, request, deadline).await;
        // An idle connection that was lost fails at its next use.
        let is_lost = |failure: &Failure| {
            failure.is_server_failure && matches!(failure.error, Error::Unknown { .. })
        };
        if kind != Kind::WriteOnce
            && result.as_ref().is_err_and(is_lost)
            && tokio::time::Instant::now() < deadline
        {
            let first = result;
            result = self.attempt(index, kind, request, deadline).await;
            // The first attempt may have been applied all the same.
            if result.is_err() {
                result = first;
            }
        }
        // A caller that waits for less than an operation may take shows nothing of a Redis that has just replied to others. In a
        // cluster another node may have replied: one that hangs would be waited for by each charge.
        let shows_nothing = timeout < usual
            && tokio::time::Instant::now() >= deadline
            && !self.breakers.is_of_cluster()
            && self.has_replied_lately();
        if result.is_ok() || !shows_nothing {
            self.account(request, &result, waiting);
        }
        let (value, connection) = result.map_err(|failure| match (kind, failure.error) {
            // A read has no unknown outcome.
            (
                Kind::Read,
                Error::Unknown {
                    retry_after,
                    reason,
                },
            ) => Error::Unavailable {
                retry_after,
                reason,
            },
            (_, error) => error,
        })?;
        if let Some(replica_wait) = &self.replica_wait
            && index == self.link.waiting()
        {
            replica_wait.wait(connection, request.first_key()).await;
        }
        Ok(value)
    }

    /// Counts the operation as in flight. `None` if too many are.
    fn enter(&self) -> Option<InFlight<'_>> {
        let before = self.in_flight.fetch_add(1, AcqRel);
        self.meters.metrics.in_flight.inc();
        let in_flight = InFlight(self);
        (before < self.max_in_flight).then_some(in_flight)
    }

    /// Returns the connection with the reply if it is the one that was asked for.
    async fn attempt(
        &self,
        index: usize,
        kind: Kind,
        request: &Request,
        deadline: tokio::time::Instant,
    ) -> Result<(Value, Option<Connection>), Failure> {
        let metrics = &self.meters.metrics;
        let wanted = index;
        let (index, mut connection) = self.connection(index, deadline).await?;
        let sending = async {
            let answer = match request {
                Request::Command(command) => connection.wire.one(command).await,
                Request::Script(call) => call_script(&mut connection.wire, call).await,
            };
            match (answer, request) {
                (Err(error), Request::Script(call)) if is_script_missing(&error) => {
                    metrics.scripts_reloaded.inc();
                    connection.wire.one(&call.by_text()).await
                }
                (answer, _) => answer,
            }
        };
        let answer = {
            let mut sending = pin!(sending);
            match timeout_at(deadline, sending.as_mut()).await {
                Ok(answer) => Ok(answer),
                // A thread that was busy sees the deadline before it reads a reply that has arrived meanwhile. It
                // reads that before this goes on.
                Err(_) => {
                    yield_now().await;
                    timeout_at(deadline, sending).await
                }
            }
        };
        match answer {
            Ok(Ok(value)) => match request.own_reply(value) {
                Some(value) => {
                    self.link.on_answer(index);
                    Ok((value, (index == wanted).then_some(connection)))
                }
                None => {
                    metrics.foreign_replies.inc();
                    self.link.on_foreign_reply(index, connection.number);
                    Err(server_failure(unknown(
                        "the reply belongs to another request",
                    )))
                }
            },
            Ok(Err(error)) => {
                let failure = classify(&error);
                if failure.is_server_failure {
                    if connection.wire.is_cluster() {
                        self.link.renew(index, &connection);
                    } else {
                        self.link.lose(index, connection.number);
                    }
                }
                Err(failure)
            }
            Err(_) => {
                if connection.wire.is_cluster() {
                    self.link.renew(index, &connection);
                } else {
                    self.link.on_timeout(index, connection.number);
                }
                let reason = match kind {
                    Kind::Read => "no reply within the time-out",
                    Kind::Write | Kind::WriteOnce => "no reply to a write within the time-out",
                };
                Err(server_failure(unknown(reason)))
            }
        }
    }

    /// Returns the connection and its index: the requested one, or the shared one if it cannot be opened.
    async fn connection(
        &self,
        index: usize,
        deadline: tokio::time::Instant,
    ) -> Result<(usize, Connection), Failure> {
        if let Some(connection) = self.link.up(index) {
            return Ok((index, connection));
        }
        let reason = match timeout_at(deadline, self.link.wire(index)).await {
            Ok(Ok(connection)) => return Ok((index, connection)),
            Ok(Err(reason)) => reason,
            Err(_) => "connecting timed out".into(),
        };
        // Its task stays on its own thread.
        match self.link.up(SHARED) {
            Some(connection) => Ok((SHARED, connection)),
            None => Err(server_failure(unavailable(BUSY_RETRY, &reason))),
        }
    }

    fn account<T>(
        &self,
        request: &Request,
        result: &Result<T, Failure>,
        waiting: impl FnOnce() -> usize,
    ) {
        match result {
            Err(failure) if failure.is_server_failure => {
                let now = observe::now();
                let opened_from = self.breakers.on_failure(request, waiting(), now);
                *self.last_failure.lock() = failure.error.to_string().into();
                // Failed trials repeat while Redis is away; one warning is enough.
                if opened_from == Some(State::Closed) {
                    warn!(
                        error = %failure.error,
                        "circuit breaker of Redis opened; operations on stored responses are refused until Redis replies"
                    );
                }
                // Connections that hang are replaced. One dead node of a cluster leaves the others theirs.
                if opened_from.is_some() && self.breakers.state() != State::Closed {
                    self.link.lose_all();
                }
            }
            // Redis replied.
            Ok(_) | Err(_) => {
                if self.breakers.on_success(request) {
                    info!("circuit breaker of Redis closed; Redis replies again");
                }
                let since = self.started.elapsed().as_millis() as u64 + 1;
                let last_reply = self.last_reply_ms.load(Relaxed);
                if last_reply == 0 || since > last_reply + REPLY_TIME_GRANULARITY_MS {
                    self.last_reply_ms.store(since, Relaxed);
                }
            }
        }
    }
}

/// As the commands that it is, if that is all, else by its script's hash.
async fn call_script(wire: &mut Wire, call: &Call) -> RedisResult<Value> {
    if let Some(commands) = call.as_commands()
        && let Some(reply) = wire.with_echo(&commands).await?
    {
        return Ok(reply);
    }
    wire.one(&call.by_hash()).await
}

/// Counts an operation while it is in flight.
struct InFlight<'a>(&'a Executor);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, AcqRel);
        self.0.meters.metrics.in_flight.dec();
    }
}
