//! Keeps a timer of an I/O thread pending while operations run there.
//!
//! The time-out of an operation is mostly the next timer of its thread, and tokio wakes a thread, by a system call, for each
//! new timer that is due before all others: one more round through the event loop for each operation. With this timer
//! pending none of them is the next one.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::AbortHandle;
use tokio::time::sleep;

/// Shorter than any time-out of an operation. An idle thread has no timer after so long.
const PERIOD: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
pub(super) struct TimerAnchor {
    is_used: AtomicBool,
    is_pending: AtomicBool,
    task: Mutex<Option<AbortHandle>>,
}

impl TimerAnchor {
    /// An operation begins. Must be called on its thread.
    pub(super) fn hold(self: &Arc<Self>) {
        if !self.is_used.load(Relaxed) {
            self.is_used.store(true, Relaxed);
        }
        if self.is_pending.load(Relaxed) || self.is_pending.swap(true, Relaxed) {
            return;
        }
        let anchor = Arc::downgrade(self);
        #[expect(
            clippy::disallowed_methods,
            reason = "it does nothing, and ends with its connection"
        )]
        let task = tokio::spawn(async move {
            loop {
                sleep(PERIOD).await;
                let Some(anchor) = anchor.upgrade() else {
                    return;
                };
                if !anchor.is_used.swap(false, Relaxed) {
                    anchor.is_pending.store(false, Relaxed);
                    return;
                }
            }
        });
        *self.task.lock() = Some(task.abort_handle());
    }
}

impl Drop for TimerAnchor {
    fn drop(&mut self) {
        if let Some(task) = self.task.get_mut().take() {
            task.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn until(what: impl Fn() -> bool) {
        for _ in 0..1_000 {
            if what() {
                return;
            }
            sleep(Duration::from_millis(10)).await;
        }
        panic!("not within 10 s");
    }

    #[tokio::test]
    async fn it_is_pending_while_operations_begin_and_ends_after_them() {
        let anchor = Arc::new(TimerAnchor::default());
        let is_pending = || anchor.is_pending.load(Relaxed);
        for _ in 0..2 {
            anchor.hold();
            assert!(is_pending());
            until(|| !is_pending()).await;
        }
        anchor.hold();
        let task = anchor.task.lock().clone().unwrap();
        drop(anchor);
        until(|| task.is_finished()).await;
    }
}
