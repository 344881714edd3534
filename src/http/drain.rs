//! The process's stop signal, and the tasks that the drain waits for.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TrackedFuture;
use tracing::info;

use super::supervisor::Supervisor;

/// The last part of a drain's time, in which what clients still wait for ends with an error: its terminal event or its
/// 503 has to be stored and to reach the client, which is a few round trips to Redis and one to the client, for
/// thousands of streams at once.
const LAST_PART: Duration = Duration::from_secs(2);
/// At most this share of a short drain, so that most of it is left to what runs.
const LAST_PART_SHARE: u32 = 2;

/// Resolves at SIGTERM or SIGINT.
pub async fn stop_signal() -> io::Result<()> {
    StopSignals::listen()?.next().await;
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopSignal {
    /// SIGTERM: a service manager.
    Terminate,
    /// SIGINT: somebody at a terminal.
    Interrupt,
}

/// SIGTERM and SIGINT. They end the process until somebody listens, and so do SIGUSR1 and SIGUSR2, which operators of other
/// proxies send to have log files opened again: from then on these are logged and ignored.
#[derive(Debug)]
pub struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
    user_1: Signal,
    user_2: Signal,
}

impl StopSignals {
    /// From now on the signals wait here.
    pub fn listen() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            user_1: signal(SignalKind::user_defined1())?,
            user_2: signal(SignalKind::user_defined2())?,
        })
    }

    pub async fn next(&mut self) -> StopSignal {
        loop {
            let ignored = tokio::select! {
                _ = self.terminate.recv() => return StopSignal::Terminate,
                _ = self.interrupt.recv() => return StopSignal::Interrupt,
                _ = self.user_1.recv() => "SIGUSR1",
                _ = self.user_2.recv() => "SIGUSR2",
            };
            info!(
                signal = ignored,
                "signal ignored: log files may be renamed at any time and need no signal; SIGTERM ends the process"
            );
        }
    }
}

/// Whether the last part of the drain has begun. It is asked on each poll, so it is no token, which takes a lock: the
/// task of each connection is polled when it begins, and polls the request of that connection or wakes its streams.
///
/// Each answer has one, so it does not count its owners, which would be a write to one place by all of them. A process has a
/// few, which are never freed.
#[derive(Clone, Debug)]
pub struct LastPart(&'static LastPartFlag);

/// Alone in its cache line, which all streams read and nobody writes until then.
#[derive(Debug, Default)]
#[repr(align(128))]
struct LastPartFlag(AtomicBool);

impl Default for LastPart {
    fn default() -> Self {
        Self(Box::leak(Box::<LastPartFlag>::default()))
    }
}

impl LastPart {
    pub fn has_begun(&self) -> bool {
        self.0.0.load(Ordering::Relaxed)
    }

    fn begin(&self) {
        self.0.0.store(true, Ordering::Relaxed);
    }

    /// What `future` comes to; `None` if the last part begins before. The task must be polled then.
    pub async fn cuts_off<F: Future>(&self, mut future: Pin<&mut F>) -> Option<F::Output> {
        poll_fn(|cx| match future.as_mut().poll(cx) {
            Poll::Pending if self.has_begun() => Poll::Ready(None),
            polled => polled.map(Some),
        })
        .await
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
    /// Cancelled when the last part of the drain begins: wakes the tasks of connections.
    ending: CancellationToken,
    /// Set together with `ending`.
    last_part: LastPart,
    /// Cancelled when the drain timeout is over: ends the tasks that still run.
    abort: CancellationToken,
    supervisor: Supervisor,
}

impl Tasks {
    /// Other tasks of the same process, which are drained at another time.
    pub fn beside(&self) -> Self {
        Self {
            supervisor: self.supervisor.clone(),
            ..Self::default()
        }
    }

    /// Makes the futures of tasks that run for as long as the process: one that is spawned as it is ends with its first panic.
    pub fn supervisor(&self) -> &Supervisor {
        &self.supervisor
    }

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

    /// Resolves when the last part of the drain begins.
    pub fn ending(&self) -> WaitForCancellationFutureOwned {
        self.ending.clone().cancelled_owned()
    }

    pub fn last_part(&self) -> &LastPart {
        &self.last_part
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

    /// Begins the last part of the drain: requests end with an error.
    fn end(&self) {
        self.last_part.begin();
        self.ending.cancel();
    }

    /// Waits until every task has ended, but no longer than `limit`; then aborts the rest. Returns how
    /// many were aborted.
    pub async fn drain(&self, limit: Duration) -> usize {
        self.drain_with(limit, |_| {}).await
    }

    /// Does what [`Tasks::drain`] does; `on_last_part` gets the number of tasks that still run when the last part begins.
    pub async fn drain_with(&self, limit: Duration, on_last_part: impl FnOnce(usize)) -> usize {
        self.stop();
        self.tracker.close();
        let last = LAST_PART.min(limit / LAST_PART_SHARE);
        if self.have_ended_within(limit - last).await {
            return 0;
        }
        on_last_part(self.tracker.len());
        self.end();
        if self.have_ended_within(last).await {
            return 0;
        }
        let left = self.tracker.len();
        self.abort.cancel();
        // An aborted task ends at its next poll.
        self.have_ended_within(Duration::from_secs(1)).await;
        left
    }

    async fn have_ended_within(&self, limit: Duration) -> bool {
        let ended = tokio::time::timeout(limit, self.tracker.wait());
        ended.await.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use tokio::sync::Notify;
    use tokio::task::yield_now;

    use super::*;

    #[tokio::test]
    async fn a_request_that_outlasts_the_drain_is_cut_off_before_its_task_is_aborted() {
        let tasks = Tasks::default();
        let cut_off = Arc::new(AtomicBool::new(false));
        let request = {
            let (last_part, cut_off) = (tasks.last_part().clone(), cut_off.clone());
            async move {
                let endless = pin!(std::future::pending::<()>());
                let ended = last_part.cuts_off(endless).await;
                cut_off.store(ended.is_none(), Ordering::Relaxed);
            }
        };
        let ending = tasks.ending();
        tasks.spawn(async move {
            tokio::join!(request, ending);
        });
        let mut left = None;
        let aborted = tasks
            .drain_with(Duration::from_millis(200), |tasks| left = Some(tasks))
            .await;
        assert_eq!((aborted, left), (0, Some(1)));
        assert!(cut_off.load(Ordering::Relaxed));
    }

    #[tokio::test]
    async fn what_ends_in_time_sees_nothing_of_the_last_part() {
        let tasks = Tasks::default();
        let last_part = tasks.last_part().clone();
        let stopped = tasks.stopped();
        tasks.spawn(stopped);
        assert_eq!(tasks.drain(Duration::from_secs(10)).await, 0);
        assert!(!last_part.has_begun());
    }

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
