//! When a source connects again after its connection ended or could not be opened. Pure.

use std::time::Duration;

use tokio::time::Instant;

#[derive(Debug, Default)]
pub(super) struct Reconnects {
    /// Failed attempts, and connections that ended soon, in a row.
    failures: u32,
    connected_at: Option<Instant>,
    /// Why there is no connection, as last reported.
    last_error: Option<String>,
}

impl Reconnects {
    pub(super) fn on_connected(&mut self, now: Instant) {
        self.connected_at = Some(now);
        self.last_error = None;
    }

    /// Returns the wait before the next attempt: `backoff`, doubled with each further failure in a row up to `max_backoff`.
    pub(super) fn on_closed(
        &mut self,
        now: Instant,
        backoff: Duration,
        max_backoff: Duration,
    ) -> Duration {
        let connected_at = self.connected_at.take();
        if connected_at.is_some_and(|at| now.duration_since(at) > max_backoff) {
            self.failures = 0;
        }
        let doubled = backoff.saturating_mul(1 << self.failures.min(30));
        self.failures = self.failures.saturating_add(1);
        doubled.min(max_backoff)
    }

    /// Whether to report why there is no connection: attempts mostly fail for the same reason, which is reported once.
    pub(super) fn is_new(&mut self, reason: &str) -> bool {
        let is_new = self.last_error.as_deref() != Some(reason);
        if is_new {
            self.last_error = Some(reason.to_owned());
        }
        is_new
    }
}

/// The wait less a part of it, so that the routers of a fleet do not reconnect at the same moment. `random`: 0 to 1.
pub(super) fn jittered(wait: Duration, random: f64) -> Duration {
    wait.mul_f64(0.5 + random / 2.0)
}
