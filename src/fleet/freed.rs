//! Wakes who waits for room at a worker, whenever a worker has less to compute, or other replicas have reported.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use tokio::sync::Notify;

/// Shared by all workers of a registry. While no request waits, it costs a worker one read of an atomic.
#[derive(Debug, Default)]
pub struct Freed {
    waiting: AtomicUsize,
    notify: Notify,
}

impl Freed {
    /// A worker has less to compute.
    pub(super) fn on_freed(&self) {
        if self.waiting.load(Relaxed) > 0 {
            self.notify.notify_one();
        }
    }

    /// So many more requests wait.
    pub fn add_waiting(&self, count: usize) {
        self.waiting.fetch_add(count, Relaxed);
        self.notify.notify_one();
    }

    pub fn remove_waiting(&self, count: usize) {
        self.waiting.fetch_sub(count, Relaxed);
    }

    /// Requests that wait, and those that were released and do not count at a worker yet.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Relaxed)
    }

    pub fn notify(&self) {
        self.notify.notify_one();
    }

    /// Resolves once something was freed since the last call. A missed call is seen a little later: the caller looks again
    /// every few milliseconds while requests wait.
    pub async fn notified(&self) {
        self.notify.notified().await;
    }
}
