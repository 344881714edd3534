//! Health checks of one worker: the one of a round, and the quick ones between two rounds while the worker's circuit breaker
//! waits for a connection.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::get::{ProbeError, get};
use crate::fleet::Worker;
use crate::fleet::engine::{Engine, READY_PATH};
use crate::observe;

/// Between two looks whether a worker takes connections again, once it took none for several requests in a row: a process
/// that its supervisor starts again may be back long before the next round, and until then no other worker may be left. A
/// few a second are little beside the requests that are refused, and they end once the worker is down.
const CONNECTION_CHECKS_APART: Duration = Duration::from_millis(500);

/// Told of a worker that has taken a new connection and answered a health check that began then, if its circuit breaker
/// waits for that.
pub type OnConnected = Arc<dyn Fn(&Worker, Instant) + Send + Sync>;

pub(super) struct HealthCheck<'a> {
    pub(super) worker: &'a Worker,
    /// `None`: it is not known yet.
    pub(super) engine: Option<Engine>,
    pub(super) limit: Duration,
    pub(super) on_connected: &'a OnConnected,
}

impl HealthCheck<'_> {
    /// One health check. If the worker's circuit breaker waits for a connection, this one is made anew.
    pub(super) async fn run(&self) -> Result<(), ProbeError> {
        let worker = self.worker;
        let awaits_connection = worker.breaker.awaits_connection();
        if awaits_connection {
            // One from before would not show that the worker takes new ones.
            worker.pool.close_idle();
        }
        let asked_at = observe::now();
        let checked = check(worker, self.engine, self.limit).await;
        if awaits_connection && checked.is_ok() {
            (self.on_connected)(worker, asked_at);
        }
        checked
    }

    /// Resolves once a worker that took no connections takes them again: then its next round is due. Checks that fail
    /// until then count for nothing.
    pub(super) async fn connected(&self) {
        loop {
            self.worker.awaits_connection().await;
            tokio::time::sleep(CONNECTION_CHECKS_APART).await;
            let is_connected = self.run().await.is_ok();
            if is_connected && !self.worker.breaker.awaits_connection() {
                return;
            }
        }
    }
}

/// One health check. The `/health` of an engine that is not known yet may take longer than the limit.
pub(super) async fn check(
    worker: &Worker,
    engine: Option<Engine>,
    limit: Duration,
) -> Result<(), ProbeError> {
    let path = engine.unwrap_or_default().capabilities().health_path;
    let failed = match get(worker, path, limit).await {
        Ok(_) => return Ok(()),
        Err(error) => error,
    };
    if engine.is_none() && !failed.is_local && failed.is_timeout {
        let ready = get(worker, READY_PATH, limit).await;
        return ready.map(|_| ()).map_err(|_| failed);
    }
    Err(failed)
}
