//! One signal to stop, and the tasks that must have ended afterwards.

pub mod keyed;

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TrackedFuture;

/// Resolves at SIGTERM or SIGINT.
pub async fn stop_signal() -> io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

/// Spawns every task of the process, tells them to stop, and waits for them.
#[derive(Clone, Debug, Default)]
pub struct Tasks {
    stop: CancellationToken,
    /// The same fact as `stop`, for those who look at it on each poll: asking the token takes a lock.
    stopping: Arc<AtomicBool>,
    tracker: TaskTracker,
    /// Dropped futures end at once; this one ends those that outlive the drain.
    abort: CancellationToken,
}

impl Tasks {
    /// Runs `task` until it ends. It should end soon after [`Tasks::stopped`].
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.spawn_on(&Handle::current(), task);
    }

    /// As [`Tasks::spawn`], on another runtime than the caller's.
    pub fn spawn_on(&self, runtime: &Handle, task: impl Future<Output = ()> + Send + 'static) {
        let abort = self.abort.clone();
        drop(runtime.spawn(self.tracker.track_future(async move {
            tokio::select! {
                biased;
                () = task => {}
                () = abort.cancelled() => {}
            }
        })));
    }

    /// Runs `task` until it ends or the process should stop: for what only watches and may be dropped.
    pub fn spawn_until_stopped(&self, task: impl Future<Output = ()> + Send + 'static) {
        let stopped = self.stopped();
        self.spawn(async move {
            tokio::select! {
                () = task => {}
                () = stopped => {}
            }
        });
    }

    /// Makes the drain wait for a task that runs elsewhere. It must look at [`Tasks::is_aborted`]
    /// itself: connections poll often, and are not wrapped.
    pub fn track<F: Future>(&self, task: F) -> TrackedFuture<F> {
        self.tracker.track_future(task)
    }

    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Resolves when the process should stop taking new work.
    pub fn stopped(&self) -> WaitForCancellationFutureOwned {
        self.stop.clone().cancelled_owned()
    }

    /// Resolves when the time to finish is over.
    pub fn aborted(&self) -> WaitForCancellationFutureOwned {
        self.abort.clone().cancelled_owned()
    }

    pub fn is_aborted(&self) -> bool {
        self.abort.is_cancelled()
    }

    /// Tells everyone to stop. A second call does nothing.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.stop.cancel();
    }

    /// Waits until every task has ended, for `limit` at most; then ends the rest. Returns how many
    /// had to be ended.
    pub async fn drain(&self, limit: Duration) -> usize {
        self.stop();
        self.tracker.close();
        if tokio::time::timeout(limit, self.tracker.wait())
            .await
            .is_ok()
        {
            return 0;
        }
        let left = self.tracker.len();
        self.abort.cancel();
        // Whoever is left was told to drop what it does; that takes a poll, not time.
        let _ = tokio::time::timeout(Duration::from_secs(1), self.tracker.wait()).await;
        left
    }
}
