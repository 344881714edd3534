//! One operation against Redis: admitted, sent, waited for until its deadline, and its failures told.
//!
//! The library's connections are tasks. Who asks on a carrier that has a connection of its own drives all of
//! it there; else it runs on the store's thread, and who asks waits for a message.

use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::time::timeout_at;
use tracing::warn;

use super::breaker::{Breaker, State, Step};
use super::link::{Joined, Link, SHARED, told};
use super::scripts::Call;
use super::settings::Settings;
use crate::observe;
use crate::store::Error;
use crate::store::meters::Meters;

/// When to come again after Redis was too busy, or refused.
const BUSY_RETRY: Duration = Duration::from_secs(1);
/// An answer that came so lately shows that Redis is there.
const FRESH: Duration = Duration::from_secs(1);
/// Within so long of the last answer another one is not noted: all carriers would write to one place.
const NOTED_MS: u64 = 50;

/// What a deadline adds for the bytes asked or sent: a tenth of 1 Gbit/s, since others share the way.
const BYTES_PER_MS: u64 = 12_500;

/// What is sent.
#[derive(Debug)]
pub(super) enum Request {
    Command(Cmd),
    /// One whose answer may have so many bytes.
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

/// What a failure after sending means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// It changes nothing, and may be sent again.
    Read,
    /// It may have been done. It may be sent again: done twice, it is as done once.
    Write,
    /// As `Write`, but done twice it says something else.
    WriteOnce,
}

/// What all operations share.
#[derive(Debug)]
pub(super) struct Asking {
    link: Arc<Link>,
    breaker: Mutex<Breaker>,
    /// Whether nothing has failed since the last answer: then nobody needs to look at the breaker.
    is_quiet: AtomicBool,
    waiting: AtomicU32,
    waiting_max: u32,
    read_timeout: Duration,
    write_timeout: Duration,
    meters: Meters,
    /// What was wrong last, while something is.
    trouble: Mutex<Arc<str>>,
    begun: Instant,
    /// Milliseconds from `begun` to the last answer, plus one; 0 for none.
    answered: AtomicU64,
}

/// An operation's failure: whether anything can have been done, and whether Redis is to blame.
struct Failure {
    error: Error,
    is_trouble: bool,
}

impl Asking {
    pub(super) fn new(link: Arc<Link>, settings: &Settings, meters: Meters) -> Self {
        Self {
            link,
            breaker: Mutex::new(Breaker::new(&settings.breaker)),
            is_quiet: AtomicBool::new(true),
            waiting: AtomicU32::new(0),
            waiting_max: settings.in_flight_max,
            read_timeout: Duration::from_millis(settings.read_timeout_ms),
            write_timeout: Duration::from_millis(settings.write_timeout_ms),
            meters,
            trouble: Mutex::new("".into()),
            begun: observe::now(),
            answered: AtomicU64::new(0),
        }
    }

    /// Whether Redis answered within the last second, and nothing has failed since.
    pub(super) fn is_fresh(&self) -> bool {
        let answered = self.answered.load(Relaxed);
        let since = self.begun.elapsed().as_millis() as u64;
        answered != 0
            && since.saturating_sub(answered) < FRESH.as_millis() as u64
            && self.is_quiet.load(Acquire)
    }

    pub(super) fn in_flight(&self) -> u32 {
        self.waiting.load(Relaxed)
    }

    pub(super) fn breaker(&self) -> State {
        self.breaker.lock().state()
    }

    pub(super) fn trouble(&self) -> Arc<str> {
        self.trouble.lock().clone()
    }

    /// To be polled where the connection of that place lives.
    pub(super) async fn ask(
        &self,
        place: usize,
        kind: Kind,
        request: &Request,
    ) -> Result<Value, Error> {
        let _waiting = self
            .wait()
            .ok_or_else(|| unavailable(BUSY_RETRY, "too many operations wait for Redis"))?;
        self.admit()?;
        let patience = match kind {
            Kind::Read => self.read_timeout,
            Kind::Write | Kind::WriteOnce => self.write_timeout,
        };
        let way = Duration::from_millis(request.bytes() / BYTES_PER_MS);
        let deadline = tokio::time::Instant::now() + patience + way;
        let mut result = self.attempt(place, kind, request, deadline).await;
        // A connection that was lost while nobody used it shows when it is used.
        let is_lost = |failure: &Failure| {
            failure.is_trouble && matches!(failure.error, Error::Unknown { .. })
        };
        if kind != Kind::WriteOnce
            && result.as_ref().is_err_and(is_lost)
            && tokio::time::Instant::now() < deadline
        {
            let first = result;
            result = self.attempt(place, kind, request, deadline).await;
            // What may have been done at first may have been done still.
            if result.is_err() {
                result = first;
            }
        }
        self.account(&result);
        result.map_err(|failure| match (kind, failure.error) {
            // Nothing is changed by reading.
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
        if self.is_quiet.load(Acquire) {
            return Ok(());
        }
        let admitted = {
            let mut breaker = self.breaker.lock();
            let admitted = breaker.admit(observe::now());
            self.meters.breaker.set(breaker.state().number());
            admitted
        };
        admitted.map_err(|left| {
            let reason = self.trouble();
            // Not sooner than clients' smallest unit.
            unavailable(left.max(BUSY_RETRY), &reason)
        })
    }

    async fn attempt(
        &self,
        place: usize,
        kind: Kind,
        request: &Request,
        deadline: tokio::time::Instant,
    ) -> Result<Value, Failure> {
        let meters = &self.meters;
        let (place, mut joined) = self.join(place, deadline).await?;
        let sending = async {
            let answer = match request {
                Request::Command(command) | Request::Bulk { command, .. } => {
                    joined.wire.one(command).await
                }
                Request::Script(call) => joined.wire.one(&call.by_hash()).await,
            };
            match (answer, request) {
                (Err(error), Request::Script(call)) if is_forgotten(&error) => {
                    meters.scripts_reloaded.inc();
                    joined.wire.one(&call.by_text()).await
                }
                (answer, _) => answer,
            }
        };
        match timeout_at(deadline, sending).await {
            Ok(Ok(value)) => {
                self.link.on_answer(place);
                Ok(value)
            }
            Ok(Err(error)) => {
                let failure = judge(&error);
                if failure.is_trouble && !joined.wire.is_cluster() {
                    self.link.lose(place, joined.life);
                }
                Err(failure)
            }
            Err(_) => {
                if !joined.wire.is_cluster() {
                    self.link.on_late(place, joined.life);
                }
                let reason = match kind {
                    Kind::Read => "no answer in time",
                    Kind::Write | Kind::WriteOnce => "no answer to a write in time",
                };
                Err(trouble(unknown(reason)))
            }
        }
    }

    /// The connection of a place, or the shared one where a carrier gets none of its own; and its place.
    async fn join(
        &self,
        place: usize,
        deadline: tokio::time::Instant,
    ) -> Result<(usize, Joined), Failure> {
        if let Some(joined) = self.link.up(place) {
            return Ok((place, joined));
        }
        let reason = match timeout_at(deadline, self.link.wire(place)).await {
            Ok(Ok(joined)) => return Ok((place, joined)),
            Ok(Err(reason)) => reason,
            Err(_) => "connecting takes too long".into(),
        };
        // Its tasks stay where they are.
        match self.link.up(SHARED) {
            Some(joined) => Ok((SHARED, joined)),
            None => Err(trouble(unavailable(BUSY_RETRY, &reason))),
        }
    }

    fn account(&self, result: &Result<Value, Failure>) {
        match result {
            Err(failure) if failure.is_trouble => {
                let step = {
                    let mut breaker = self.breaker.lock();
                    self.is_quiet.store(false, Release);
                    let step = breaker.on_failure(observe::now());
                    self.meters.breaker.set(breaker.state().number());
                    step
                };
                *self.trouble.lock() = failure.error.to_string().into();
                if step == Step::Opened {
                    warn!(error = %failure.error, "Redis is not asked for a while");
                    // What hangs is not waited for again.
                    self.link.lose_all();
                }
            }
            // Redis has answered.
            Ok(_) | Err(_) => {
                if !self.is_quiet.load(Acquire) {
                    let mut breaker = self.breaker.lock();
                    breaker.on_success();
                    self.is_quiet.store(true, Release);
                    self.meters.breaker.set(breaker.state().number());
                }
                let since = self.begun.elapsed().as_millis() as u64 + 1;
                let noted = self.answered.load(Relaxed);
                if noted == 0 || since > noted + NOTED_MS {
                    self.answered.store(since, Relaxed);
                }
            }
        }
    }
}

/// Counts an operation for as long as it waits.
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

fn trouble(error: Error) -> Failure {
    Failure {
        error,
        is_trouble: true,
    }
}

fn is_forgotten(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

/// Whether the server is well and one key is damaged: it is of another type, or a script fell over what
/// it found there. Older servers tell what a command in a script met as the script's own error.
fn is_of_one_key(error: &RedisError) -> bool {
    const OF_THE_SERVER: [&str; 6] = [
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
            detail.contains("user_script") && !OF_THE_SERVER.iter().any(|it| detail.contains(it))
        }
        _ => false,
    }
}

/// What an error of the library means for a write.
fn judge(error: &RedisError) -> Failure {
    let reason = told(error);
    match error.code() {
        Some("OOM") => {
            return Failure {
                error: Error::Full {
                    retry_after: BUSY_RETRY,
                },
                is_trouble: false,
            };
        }
        Some("NEWER") => {
            let reason = format!("written by a newer release: {reason}");
            return Failure {
                error: Error::Unreadable(reason.into()),
                is_trouble: false,
            };
        }
        // A script that Redis is busy with, replicas that are missing, a disk that is full.
        Some("BUSY" | "NOREPLICAS" | "MISCONF" | "UNKILLABLE" | "NOAUTH" | "WRONGPASS") => {
            return trouble(unavailable(BUSY_RETRY, &reason));
        }
        _ => {}
    }
    match error.kind() {
        // Redis said no before it did anything.
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
        ) => trouble(unavailable(BUSY_RETRY, &reason)),
        // It never got there.
        ErrorKind::ClusterConnectionNotFound
        | ErrorKind::AuthenticationFailed
        | ErrorKind::InvalidClientConfig
        | ErrorKind::MasterNameNotFoundBySentinel
        | ErrorKind::NoValidReplicasFoundBySentinel
        | ErrorKind::EmptySentinelList => trouble(unavailable(BUSY_RETRY, &reason)),
        ErrorKind::Io if error.is_connection_refusal() => trouble(unavailable(BUSY_RETRY, &reason)),
        _ if is_of_one_key(error) => Failure {
            error: Error::Unreadable(reason.into()),
            is_trouble: false,
        },
        _ => trouble(unknown(&reason)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_server(line: &str) -> Failure {
        let error = redis::parse_redis_value(format!("-{line}\r\n").as_bytes())
            .and_then(|value| value.extract_error())
            .unwrap_err();
        judge(&error)
    }

    #[test]
    fn what_is_wrong_with_one_key_is_no_trouble_of_the_server() {
        for line in [
            "WRONGTYPE Operation against a key holding the wrong kind of value",
            "ERR user_script:9: attempt to compare number with nil script: 1f, on @user_script:9.",
            "ERR Error running script (call to f_1f): @user_script:9: WRONGTYPE Operation against a key",
        ] {
            let failure = of_server(line);
            assert!(!failure.is_trouble, "{line}");
            assert!(matches!(failure.error, Error::Unreadable(_)), "{line}");
        }
        for line in [
            "ERR max number of clients reached",
            "ERR Error running script (call to f_1f): @user_script:9: -MISCONF Redis is configured to save",
            "MISCONF Redis is configured to save",
            "LOADING Redis is loading the dataset in memory",
            "STRANGE never heard of",
        ] {
            assert!(of_server(line).is_trouble, "{line}");
        }
    }
}
