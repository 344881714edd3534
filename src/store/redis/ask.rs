//! One operation against Redis: admission, sending, the deadline, one retry, and what an error means.
//!
//! A connection of the library is a task. An I/O thread with a connection of its own runs that task itself;
//! otherwise the task runs on the store's thread.

use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::time::timeout_at;
use tracing::warn;

use super::breaker::{Breaker, State, Step};
use super::link::{Connection, Link, SHARED, error_text};
use super::scripts::Call;
use super::settings::Settings;
use crate::observe;
use crate::store::Error;
use crate::store::meters::Meters;

/// When clients should retry after Redis was busy or refused.
const BUSY_RETRY: Duration = Duration::from_secs(1);
/// A reply this recent shows that Redis is up.
const FRESH: Duration = Duration::from_secs(1);
/// The time of the last reply is updated at most this often, because all I/O threads write to it.
const REPLY_TIME_GRANULARITY_MS: u64 = 50;

/// Added to a deadline for the bytes transferred: a tenth of 1 Gbit/s, because operations share the connection.
const BYTES_PER_MS: u64 = 12_500;

/// A command or script for Redis.
#[derive(Debug)]
pub(super) enum Request {
    Command(Cmd),
    /// A command whose reply may have this many bytes.
    Bulk {
        command: Cmd,
        bytes: u64,
    },
    Script(Call),
}

impl Request {
    fn bytes(&self) -> u64 {
        match self {
            Self::Command(_) => 0,
            Self::Bulk { bytes, .. } => *bytes,
            Self::Script(call) => call.bytes(),
        }
    }
}

/// Whether an operation may be repeated, and what a missing reply means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Changes nothing, may be repeated.
    Read,
    /// Idempotent write, may be repeated.
    Write,
    /// A write whose second application returns something else; never repeated.
    WriteOnce,
}

/// The state that all operations share.
#[derive(Debug)]
pub(super) struct Asking {
    link: Arc<Link>,
    breaker: Mutex<Breaker>,
    /// Whether nothing has failed since the last reply, so that the circuit breaker need not be locked.
    is_healthy: AtomicBool,
    waiting: AtomicU32,
    waiting_max: u32,
    read_timeout: Duration,
    write_timeout: Duration,
    meters: Meters,
    last_failure: Mutex<Arc<str>>,
    begun: Instant,
    /// Milliseconds from `begun` to the last reply, plus one; 0 for none.
    answered: AtomicU64,
}

/// A failed operation.
struct Failure {
    error: Error,
    /// Whether the circuit breaker counts it: the server failed, not just one key.
    is_server_failure: bool,
}

impl Asking {
    pub(super) fn new(link: Arc<Link>, settings: &Settings, meters: Meters) -> Self {
        Self {
            link,
            breaker: Mutex::new(Breaker::new(&settings.advanced.circuit_breaker)),
            is_healthy: AtomicBool::new(true),
            waiting: AtomicU32::new(0),
            waiting_max: settings.advanced.max_in_flight,
            read_timeout: settings.advanced.read_timeout,
            write_timeout: settings.advanced.write_timeout,
            meters,
            last_failure: Mutex::new("".into()),
            begun: observe::now(),
            answered: AtomicU64::new(0),
        }
    }

    /// Whether Redis replied within the last second, and nothing has failed since.
    pub(super) fn is_fresh(&self) -> bool {
        let answered = self.answered.load(Relaxed);
        let since = self.begun.elapsed().as_millis() as u64;
        answered != 0
            && since.saturating_sub(answered) < FRESH.as_millis() as u64
            && self.is_healthy.load(Acquire)
    }

    pub(super) fn in_flight(&self) -> u32 {
        self.waiting.load(Relaxed)
    }

    pub(super) fn breaker(&self) -> State {
        self.breaker.lock().state()
    }

    pub(super) fn last_failure(&self) -> Arc<str> {
        self.last_failure.lock().clone()
    }

    /// Executes a request. Must be polled on the thread of that connection.
    pub(super) async fn ask(
        &self,
        index: usize,
        kind: Kind,
        request: &Request,
    ) -> Result<Value, Error> {
        let _waiting = self
            .wait()
            .ok_or_else(|| unavailable(BUSY_RETRY, "too many operations are waiting for Redis"))?;
        self.admit()?;
        let timeout = match kind {
            Kind::Read => self.read_timeout,
            Kind::Write | Kind::WriteOnce => self.write_timeout,
        };
        let transfer = Duration::from_millis(request.bytes() / BYTES_PER_MS);
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
        self.account(&result);
        result.map_err(|failure| match (kind, failure.error) {
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
        })
    }

    fn wait(&self) -> Option<Waiting<'_>> {
        let before = self.waiting.fetch_add(1, AcqRel);
        self.meters.in_flight.inc();
        let waiting = Waiting(self);
        (before < self.waiting_max).then_some(waiting)
    }

    fn admit(&self) -> Result<(), Error> {
        if self.is_healthy.load(Acquire) {
            return Ok(());
        }
        let admitted = {
            let mut breaker = self.breaker.lock();
            let admitted = breaker.admit(observe::now());
            self.meters.breaker.set(breaker.state().number());
            admitted
        };
        admitted.map_err(|left| {
            let reason = self.last_failure();
            // Clients' smallest unit is a second.
            unavailable(left.max(BUSY_RETRY), &reason)
        })
    }

    async fn attempt(
        &self,
        index: usize,
        kind: Kind,
        request: &Request,
        deadline: tokio::time::Instant,
    ) -> Result<Value, Failure> {
        let meters = &self.meters;
        let (index, mut connection) = self.connection(index, deadline).await?;
        let sending = async {
            let answer = match request {
                Request::Command(command) | Request::Bulk { command, .. } => {
                    connection.wire.one(command).await
                }
                Request::Script(call) => connection.wire.one(&call.by_hash()).await,
            };
            match (answer, request) {
                (Err(error), Request::Script(call)) if is_script_missing(&error) => {
                    meters.scripts_reloaded.inc();
                    connection.wire.one(&call.by_text()).await
                }
                (answer, _) => answer,
            }
        };
        match timeout_at(deadline, sending).await {
            Ok(Ok(value)) => {
                self.link.on_answer(index);
                Ok(value)
            }
            Ok(Err(error)) => {
                let failure = classify(&error);
                if failure.is_server_failure && !connection.wire.is_cluster() {
                    self.link.lose(index, connection.number);
                }
                Err(failure)
            }
            Err(_) => {
                if !connection.wire.is_cluster() {
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

    fn account(&self, result: &Result<Value, Failure>) {
        match result {
            Err(failure) if failure.is_server_failure => {
                let step = {
                    let mut breaker = self.breaker.lock();
                    self.is_healthy.store(false, Release);
                    let step = breaker.on_failure(observe::now());
                    self.meters.breaker.set(breaker.state().number());
                    step
                };
                *self.last_failure.lock() = failure.error.to_string().into();
                if step == Step::Opened {
                    warn!(
                        error = %failure.error,
                        "circuit breaker of Redis opened; operations on stored responses are refused until Redis replies"
                    );
                    // Connections that hang are replaced.
                    self.link.lose_all();
                }
            }
            // Redis replied.
            Ok(_) | Err(_) => {
                if !self.is_healthy.load(Acquire) {
                    let mut breaker = self.breaker.lock();
                    breaker.on_success();
                    self.is_healthy.store(true, Release);
                    self.meters.breaker.set(breaker.state().number());
                }
                let since = self.begun.elapsed().as_millis() as u64 + 1;
                let noted = self.answered.load(Relaxed);
                if noted == 0 || since > noted + REPLY_TIME_GRANULARITY_MS {
                    self.answered.store(since, Relaxed);
                }
            }
        }
    }
}

/// Counts an operation while it waits for Redis.
struct Waiting<'a>(&'a Asking);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, AcqRel);
        self.0.meters.in_flight.dec();
    }
}

fn unavailable(retry_after: Duration, reason: &str) -> Error {
    Error::Unavailable {
        retry_after,
        reason: reason.into(),
    }
}

fn unknown(reason: &str) -> Error {
    Error::Unknown {
        retry_after: BUSY_RETRY,
        reason: reason.into(),
    }
}

fn server_failure(error: Error) -> Failure {
    Failure {
        error,
        is_server_failure: true,
    }
}

fn is_script_missing(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

/// Whether the server works and one key is damaged: it has the wrong type, or a script failed on its content.
/// Older servers report the failure of a command inside a script as the script's own error.
fn is_key_damaged(error: &RedisError) -> bool {
    const SERVER_ERRORS: [&str; 6] = [
        "OOM",
        "MISCONF",
        "NOREPLICAS",
        "READONLY",
        "LOADING",
        "NOPERM",
    ];
    let detail = error.detail().unwrap_or_default();
    match error.code() {
        Some("WRONGTYPE") => true,
        Some("ERR") => {
            detail.contains("user_script")
                && !SERVER_ERRORS.iter().any(|code| detail.contains(code))
        }
        _ => false,
    }
}

/// Translates an error of the Redis library.
fn classify(error: &RedisError) -> Failure {
    let reason = error_text(error);
    match error.code() {
        Some("OOM") => {
            return Failure {
                error: Error::Full {
                    retry_after: BUSY_RETRY,
                },
                is_server_failure: false,
            };
        }
        Some("NEWER") => {
            let reason = format!("written by a newer release: {reason}");
            return Failure {
                error: Error::Unreadable(reason.into()),
                is_server_failure: false,
            };
        }
        // Blocked by a script, missing replicas, a full disk, wrong credentials.
        Some("BUSY" | "NOREPLICAS" | "MISCONF" | "UNKILLABLE" | "NOAUTH" | "WRONGPASS") => {
            return server_failure(unavailable(BUSY_RETRY, &reason));
        }
        _ => {}
    }
    match error.kind() {
        // Redis refused before it executed anything.
        ErrorKind::Server(
            ServerErrorKind::BusyLoading
            | ServerErrorKind::ClusterDown
            | ServerErrorKind::MasterDown
            | ServerErrorKind::ReadOnly
            | ServerErrorKind::TryAgain
            | ServerErrorKind::Moved
            | ServerErrorKind::Ask
            | ServerErrorKind::NoScript
            | ServerErrorKind::NoPerm
            | ServerErrorKind::CrossSlot,
        ) => server_failure(unavailable(BUSY_RETRY, &reason)),
        // The request was never sent.
        ErrorKind::ClusterConnectionNotFound
        | ErrorKind::AuthenticationFailed
        | ErrorKind::InvalidClientConfig
        | ErrorKind::MasterNameNotFoundBySentinel
        | ErrorKind::NoValidReplicasFoundBySentinel
        | ErrorKind::EmptySentinelList => server_failure(unavailable(BUSY_RETRY, &reason)),
        ErrorKind::Io if error.is_connection_refusal() => {
            server_failure(unavailable(BUSY_RETRY, &reason))
        }
        _ if is_key_damaged(error) => Failure {
            error: Error::Unreadable(reason.into()),
            is_server_failure: false,
        },
        _ => server_failure(unknown(&reason)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure_of(line: &str) -> Failure {
        let error = redis::parse_redis_value(format!("-{line}\r\n").as_bytes())
            .and_then(|value| value.extract_error())
            .unwrap_err();
        classify(&error)
    }

    #[test]
    fn a_damaged_key_does_not_count_as_a_server_failure() {
        for line in [
            "WRONGTYPE Operation against a key holding the wrong kind of value",
            "ERR user_script:9: attempt to compare number with nil script: 1f, on @user_script:9.",
            "ERR Error running script (call to f_1f): @user_script:9: WRONGTYPE Operation against a key",
        ] {
            let failure = failure_of(line);
            assert!(!failure.is_server_failure, "{line}");
            assert!(matches!(failure.error, Error::Unreadable(_)), "{line}");
        }
        for line in [
            "ERR max number of clients reached",
            "ERR Error running script (call to f_1f): @user_script:9: -MISCONF Redis is configured to save",
            "MISCONF Redis is configured to save",
            "LOADING Redis is loading the dataset in memory",
            "STRANGE never heard of",
        ] {
            assert!(failure_of(line).is_server_failure, "{line}");
        }
    }
}
