//! Waits until replicas of Redis have a write (`WAIT`), so that a failover to one of them keeps it.
//!
//! `WAIT` blocks its connection, so writes that wait have a connection of their own. One `WAIT` is outstanding at a
//! time, and covers every write that was answered before it on that connection.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::AcqRel;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use redis::Value;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;
use tracing::{info, warn};

use super::breakers::slot;
use super::link::Connection;
use super::settings::Wait;
use crate::observe;
use crate::observe::metrics::words;
use crate::store::meters::Meters;

/// After a time-out writes do not wait for this long: replicas that are gone slow down one write a second, not all.
const RETRY: Duration = Duration::from_secs(1);
/// For the reply itself, beyond the time that Redis waits.
const REPLY_TIMEOUT: Duration = Duration::from_millis(250);

words! {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Replicated {
        Acknowledged = "acknowledged",
        /// The replicas did not answer in time, or there are too few, or too many writes waited for them already.
        TimedOut = "timed_out",
        /// They did not answer the last time, or the write was answered on a connection on which no write waits.
        NotAsked = "not_asked",
    }
}

#[derive(Debug)]
pub(super) struct ReplicaWait {
    replicas: u32,
    timeout: Duration,
    /// Held by the one that waits.
    turn: Semaphore,
    answered: AtomicU64,
    progress: Mutex<Progress>,
    meters: Meters,
}

/// What the replicas have. Pure.
#[derive(Debug, Default)]
struct Progress {
    /// The connection (by its number) and the last of its writes that replicas have.
    acknowledged: Option<(u64, u64)>,
    /// Replicas did not answer: when to ask them again.
    retry_at: Option<Instant>,
}

impl Progress {
    /// The result for this write of this connection if it needs no `WAIT`.
    fn known(&self, now: Instant, connection: u64, write: u64) -> Option<Replicated> {
        let has = |(number, last)| number == connection && write <= last;
        if self.acknowledged.is_some_and(has) {
            return Some(Replicated::Acknowledged);
        }
        let is_suspended = self.retry_at.is_some_and(|at| now < at);
        is_suspended.then_some(Replicated::NotAsked)
    }

    /// A `WAIT` on this connection ended that covers the writes up to `write`. True if that is a change.
    fn on_result(&mut self, now: Instant, connection: u64, write: u64, has_enough: bool) -> bool {
        let had_failed = self.retry_at.is_some();
        if has_enough {
            self.acknowledged = Some((connection, write));
            self.retry_at = None;
        } else {
            self.retry_at = Some(now + RETRY);
        }
        had_failed == has_enough
    }
}

impl ReplicaWait {
    /// `None` if writes do not wait.
    pub(super) fn new(settings: &Wait, meters: &Meters) -> Option<Self> {
        (settings.replicas > 0).then(|| Self {
            replicas: settings.replicas,
            timeout: settings.timeout,
            turn: Semaphore::new(1),
            answered: AtomicU64::new(0),
            progress: Mutex::default(),
            meters: meters.clone(),
        })
    }

    /// Waits until replicas have the write that Redis has just answered on this connection. `None`: on one on which no
    /// write waits.
    pub(super) async fn wait(&self, connection: Option<Connection>, key: &[u8]) {
        let replicated = match connection {
            Some(connection) => self.replicated(connection, key).await,
            None => Replicated::NotAsked,
        };
        let counter = &self.meters.metrics.replica_waits;
        counter.with_label_values(&[replicated.as_str()]).inc();
    }

    /// The turn to wait for replicas; `None` if it does not come within `patience`.
    async fn turn(&self, patience: Duration) -> Option<SemaphorePermit<'_>> {
        timeout(patience, self.turn.acquire()).await.ok()?.ok()
    }

    async fn replicated(&self, mut connection: Connection, key: &[u8]) -> Replicated {
        let write = self.answered.fetch_add(1, AcqRel) + 1;
        let known = |now| self.progress.lock().known(now, connection.number, write);
        // One `WAIT` covers all writes before it, so no write waits for more than two. In a cluster it covers one.
        let turn = self.turn(2 * (self.timeout + REPLY_TIMEOUT)).await;
        if let Some(known) = known(observe::now()) {
            return known;
        }
        let Some(_turn) = turn else {
            return Replicated::TimedOut;
        };
        // In a cluster each write is on its own node, so only this one is covered.
        let covered = if connection.wire.is_cluster() {
            0
        } else {
            self.answered.load(std::sync::atomic::Ordering::Acquire)
        };
        let timeout_ms = self.timeout.as_millis() as u64;
        let command = redis::cmd("WAIT").arg((self.replicas, timeout_ms)).take();
        let waiting = connection.wire.at_slot(command, slot(key));
        let reply = timeout(self.timeout + REPLY_TIMEOUT, waiting).await;
        let has_enough = match reply {
            Ok(Ok(Value::Int(replicas))) => replicas >= i64::from(self.replicas),
            Ok(_) | Err(_) => false,
        };
        let now = observe::now();
        let number = connection.number;
        let is_change = self
            .progress
            .lock()
            .on_result(now, number, covered, has_enough);
        match (is_change, has_enough) {
            (true, true) => info!("replicas of Redis acknowledge writes again"),
            (true, false) => warn!(
                replicas = self.replicas,
                "too few replicas of Redis acknowledged a write in time; writes stand, and a failover may lose them"
            ),
            (false, _) => {}
        }
        if has_enough {
            Replicated::Acknowledged
        } else {
            Replicated::TimedOut
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::metrics::Registry;

    #[tokio::test]
    async fn a_write_does_not_wait_for_its_turn_for_ever() {
        let settings = Wait {
            replicas: 1,
            ..Wait::default()
        };
        let meters = Meters::new(&Registry::default());
        let wait = ReplicaWait::new(&settings, &meters).unwrap();
        let first = wait.turn(Duration::MAX).await;
        assert!(first.is_some());
        assert!(wait.turn(Duration::ZERO).await.is_none());
        drop(first);
        assert!(wait.turn(Duration::ZERO).await.is_some());
    }

    #[test]
    fn a_wait_covers_earlier_writes_of_its_connection_alone() {
        let now = observe::now();
        let mut progress = Progress::default();
        assert_eq!(progress.known(now, 1, 1), None);
        assert!(!progress.on_result(now, 1, 3, true));
        let acknowledged = Some(Replicated::Acknowledged);
        assert_eq!(progress.known(now, 1, 3), acknowledged);
        assert_eq!(progress.known(now, 1, 4), None);
        assert_eq!(progress.known(now, 2, 1), None);
    }

    #[test]
    fn replicas_that_do_not_answer_are_asked_once_a_second() {
        let now = observe::now();
        let at = |ms| now + Duration::from_millis(ms);
        let mut progress = Progress::default();
        assert!(progress.on_result(at(0), 1, 1, false));
        assert_eq!(progress.known(at(999), 1, 2), Some(Replicated::NotAsked));
        assert_eq!(progress.known(at(1_000), 1, 2), None);
        assert!(!progress.on_result(at(1_100), 1, 2, false));
        assert_eq!(progress.known(at(2_000), 1, 3), Some(Replicated::NotAsked));
        assert!(progress.on_result(at(2_200), 1, 4, true));
        assert_eq!(progress.known(at(2_200), 1, 5), None);
    }
}
