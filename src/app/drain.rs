//! Ends a router in order: not ready, still serving, finishing.

use std::future::Future;
use std::time::Duration;

use tracing::{info, warn};

use super::App;

/// Time for operators' pages that are being sent when the drain is over, and for what engines are asked to abort then.
const ADMIN_DRAIN: Duration = Duration::from_millis(500);

/// A disk that does not take the last lines must not keep the process alive.
const USAGE_FLUSH: Duration = Duration::from_secs(1);

impl App {
    /// Is not ready any more, but goes on for `drain_delay` or until `hurry` resolves: load balancers still send
    /// requests until they have noticed. Not if somebody at a terminal stops it (`is_interrupt`), and nobody ever asked whether it
    /// is ready.
    pub async fn announce_drain(&self, is_interrupt: bool, hurry: impl Future<Output = ()>) {
        self.readiness.begin_drain();
        self.queues.begin_drain();
        let delay = self.reload.status.running().api.drain_delay;
        if delay.is_zero() || is_interrupt && !self.readiness.was_asked() {
            return;
        }
        info!(
            ?delay,
            "not ready any more; new requests are taken until the delay is over (Ctrl-C or SIGTERM again: at once)"
        );
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            () = hurry => {}
        }
    }

    /// Stops accepting, lets running requests finish within the drain timeout, ends those that do not with an error,
    /// and aborts the rest.
    pub async fn drain(&self) {
        let timeout = self.reload.status.running().api.drain_timeout;
        info!(
            ?timeout,
            "draining: no new connections, running requests finish"
        );
        self.queues.begin_drain();
        if let Some(sharing) = &self.sharing {
            sharing.begin_drain();
        }
        let on_last_part = |tasks: usize| {
            warn!(
                tasks,
                "the drain timeout is nearly over; requests that still run end with an error"
            );
        };
        match self.tasks.drain_with(timeout, on_last_part).await {
            0 => info!("drained"),
            aborted => warn!(
                aborted,
                "drain timeout is over; connections and tasks were aborted"
            ),
        }
        // The last request has ended: one more report to the other replicas.
        if let Some(sharing) = &self.sharing {
            sharing.end().await;
        }
        self.usage.flush(USAGE_FLUSH);
        self.traces.flush().await;
        self.admin_tasks.drain(ADMIN_DRAIN).await;
    }
}
