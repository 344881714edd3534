//! The process's stop signal, and the tasks that the drain waits for.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TrackedFuture;

/// Resolves at SIGTERM or SIGINT.
pub async fn stop_signal() -> io::Result<()> {
    StopSignals::listen()?.next().await;
    Ok(())
}

/// What asked the process to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopSignal {
    /// SIGTERM: a service manager.
    Terminate,
    /// SIGINT: somebody at a terminal.
    Interrupt,
}

/// SIGTERM and SIGINT. They end the process until somebody listens.
#[derive(Debug)]
pub struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    /// From now on the signals wait here.
    pub fn listen() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// The next one.
    pub async fn next(&mut self) -> StopSignal {
        tokio::select! {
            _ = self.terminate.recv() => StopSignal::Terminate,
            _ = self.interrupt.recv() => StopSignal::Interrupt,
        }
    }
}

/// Spawns and tracks tasks, asks them to stop, and waits until they have ended.
#[derive(Clone, Debug, Default)]
pub struct Tasks {
    /// Cancelled when the drain begins: finish what runs, take nothing new.
    stop: CancellationToken,
    /// Set together with `stop`, for connections, which read it on each poll: the token takes a lock.
    stopping: Arc<AtomicBool>,
    tracker: TaskTracker,
    /// Cancelled when the drain timeout is over: ends the tasks that still run.
    abort: CancellationToken,
}

impl Tasks {
    /// Runs `task` until it ends. It should end soon after [`Tasks::stopped`].
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let abort = self.abort.clone();
        drop(self.tracker.spawn(async move {
            tokio::select! {
                biased;
                () = task => {}
                () = abort.cancelled() => {}
            }
        }));
    }

    /// Runs `task` until it ends or the drain begins: for tasks with nothing to finish, such as probes.
    pub fn spawn_until_stopped(&self, task: impl Future<Output = ()> + Send + 'static) {
        drop(Handle::current().spawn(self.track_until_stopped(task)));
    }

    /// As [`Tasks::spawn_until_stopped`], on another runtime than the caller's.
    pub fn spawn_until_stopped_on(
        &self,
        runtime: &Handle,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        drop(runtime.spawn(self.track_until_stopped(task)));
    }

    /// The future to spawn for a task that is dropped when the drain begins, and that the drain waits for.
    pub fn track_until_stopped(
        &self,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> impl Future<Output = ()> + Send + 'static {
        let stopped = self.stopped();
        self.tracker.track_future(async move {
            tokio::select! {
                // First: what looks for work must find none once the drain has begun.
                biased;
                () = stopped => {}
                () = task => {}
            }
        })
    }

    /// Makes the drain wait for a task that the caller spawns. The task must check
    /// [`Tasks::is_aborted`] itself: connections poll often, so they are not wrapped.
    pub fn track<F: Future>(&self, task: F) -> TrackedFuture<F> {
        self.tracker.track_future(task)
    }

    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Resolves when the drain begins.
    pub fn stopped(&self) -> WaitForCancellationFutureOwned {
        self.stop.clone().cancelled_owned()
    }

    /// Resolves when the drain timeout is over.
    pub fn aborted(&self) -> WaitForCancellationFutureOwned {
        self.abort.clone().cancelled_owned()
    }

    pub fn is_aborted(&self) -> bool {
        self.abort.is_cancelled()
    }

    /// Begins the drain. A second call does nothing.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.stop.cancel();
    }

    /// Waits until every task has ended, but no longer than `limit`; then aborts the rest. Returns how
    /// many were aborted.
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
        // An aborted task ends at its next poll.
        let _ = tokio::time::timeout(Duration::from_secs(1), self.tracker.wait()).await;
        left
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::Notify;
    use tokio::task::yield_now;

    use super::*;

    #[tokio::test]
    async fn a_task_that_is_woken_as_the_drain_begins_does_nothing_more() {
        for _ in 0..50 {
            let tasks = Tasks::default();
            let wake = Arc::new(Notify::new());
            let has_run = Arc::new(AtomicBool::new(false));
            tasks.spawn_until_stopped({
                let (wake, has_run) = (wake.clone(), has_run.clone());
                async move {
                    wake.notified().await;
                    has_run.store(true, Ordering::Relaxed);
                }
            });
            yield_now().await;
            wake.notify_one();
            tasks.stop();
            let aborted = tasks.drain(Duration::from_secs(10)).await;
            assert_eq!((aborted, has_run.load(Ordering::Relaxed)), (0, false));
        }
    }
}
