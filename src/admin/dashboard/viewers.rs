//! The pages that are open: each is an answer that never ends by itself. Bounded, and each has a short queue: a viewer
//! that reads slowly misses updates and then gets everything anew, so it costs no memory.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};

use crate::http::BodyError;
use crate::observe::metrics::{Registry, metric_table};

/// Updates that wait for a viewer.
const MAX_PENDING: usize = 2;

#[derive(Debug)]
pub(super) struct Viewers {
    max: AtomicU32,
    state: Mutex<State>,
    /// Wakes the task that sends updates when a viewer has come.
    joined: Notify,
    metrics: Metrics,
}

#[derive(Debug, Default)]
struct State {
    viewers: Vec<Viewer>,
    /// The drain has begun.
    is_closed: bool,
}

#[derive(Debug)]
struct Viewer {
    updates: mpsc::Sender<Bytes>,
    /// It has nothing yet, or missed an update.
    needs_all: bool,
}

metric_table! {
    #[derive(Debug)]
    struct Metrics {
        viewers: gauge "warmroute_dashboard_viewers" "Open dashboards that get updates from this router.",
        refused: counter "warmroute_dashboard_viewers_refused_total"
            "Dashboards that got no updates because `admin.dashboard.max_viewers` others did.",
        missed: counter "warmroute_dashboard_missed_updates_total"
            "Updates that a viewer missed because it read too slowly; it gets everything anew.",
    }
}

/// Why there is no further viewer.
#[derive(Debug, PartialEq)]
pub(super) enum Refused {
    TooMany(u32),
    Draining,
}

impl Viewers {
    pub(super) fn new(max: u32, registry: &Registry) -> Self {
        Self {
            max: AtomicU32::new(max),
            state: Mutex::default(),
            joined: Notify::new(),
            metrics: Metrics::new(registry),
        }
    }

    /// Viewers beyond a smaller bound stay.
    pub(super) fn set_max(&self, max: u32) {
        self.max.store(max, Relaxed);
    }

    pub(super) fn max(&self) -> u32 {
        self.max.load(Relaxed)
    }

    pub(super) fn are_there(&self) -> bool {
        !self.state.lock().viewers.is_empty()
    }

    /// The body of one more viewer's answer.
    pub(super) fn join(self: &Arc<Self>) -> Result<Updates, Refused> {
        let max = self.max();
        let mut state = self.state.lock();
        if state.is_closed {
            return Err(Refused::Draining);
        }
        state.viewers.retain(|viewer| !viewer.updates.is_closed());
        if state.viewers.len() >= max as usize {
            self.metrics.refused.inc();
            return Err(Refused::TooMany(max));
        }
        let (sender, updates) = mpsc::channel(MAX_PENDING);
        state.viewers.push(Viewer {
            updates: sender,
            needs_all: true,
        });
        self.metrics.viewers.set(state.viewers.len() as i64);
        drop(state);
        self.joined.notify_one();
        Ok(Updates {
            updates,
            viewers: self.clone(),
        })
    }

    /// Resolves when a viewer has come.
    pub(super) async fn joined(&self) {
        self.joined.notified().await;
    }

    /// Sends an update to each viewer that has all before it, and everything to the others.
    pub(super) fn send(&self, update: &Bytes, all: impl FnOnce() -> Bytes) {
        let mut state = self.state.lock();
        let needs_all = state.viewers.iter().any(|viewer| viewer.needs_all);
        let all = needs_all.then(all);
        for viewer in &mut state.viewers {
            let message = match &all {
                Some(all) if viewer.needs_all => all,
                _ => update,
            };
            viewer.needs_all = match viewer.updates.try_send(message.clone()) {
                Ok(()) => false,
                Err(mpsc::error::TrySendError::Full(_)) => {
                    self.metrics.missed.inc();
                    true
                }
                // Its body is gone and removes it.
                Err(mpsc::error::TrySendError::Closed(_)) => false,
            };
        }
    }

    /// Ends every viewer's answer, for the drain.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.is_closed = true;
        state.viewers.clear();
        self.metrics.viewers.set(0);
    }
}

/// The body of a viewer's answer. The viewer is gone when it is dropped.
#[derive(Debug)]
pub(super) struct Updates {
    updates: mpsc::Receiver<Bytes>,
    viewers: Arc<Viewers>,
}

impl Body for Updates {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let update = self.updates.poll_recv(cx);
        update.map(|update| update.map(|bytes| Ok(Frame::data(bytes))))
    }
}

impl Drop for Updates {
    fn drop(&mut self) {
        self.updates.close();
        let mut state = self.viewers.state.lock();
        state.viewers.retain(|viewer| !viewer.updates.is_closed());
        self.viewers.metrics.viewers.set(state.viewers.len() as i64);
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    fn viewers(max: u32) -> (Registry, Arc<Viewers>) {
        let registry = Registry::default();
        let viewers = Arc::new(Viewers::new(max, &registry));
        (registry, viewers)
    }

    fn send(viewers: &Viewers, update: &'static str) {
        viewers.send(&Bytes::from_static(update.as_bytes()), || {
            Bytes::from(format!("all at {update}"))
        });
    }

    async fn next(updates: &mut Updates) -> String {
        let frame = updates.frame().await.unwrap().unwrap();
        String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap()
    }

    #[tokio::test]
    async fn a_viewer_gets_everything_and_then_updates() {
        let (_, viewers) = viewers(2);
        let mut first = viewers.join().unwrap();
        send(&viewers, "1");
        let mut second = viewers.join().unwrap();
        send(&viewers, "2");
        assert_eq!(next(&mut first).await, "all at 1");
        assert_eq!(next(&mut first).await, "2");
        assert_eq!(next(&mut second).await, "all at 2");
    }

    #[tokio::test]
    async fn a_viewer_that_missed_an_update_gets_everything_anew() {
        let (_, viewers) = viewers(1);
        let mut slow = viewers.join().unwrap();
        for update in ["1", "2", "3"] {
            send(&viewers, update);
        }
        assert_eq!(next(&mut slow).await, "all at 1");
        assert_eq!(next(&mut slow).await, "2");
        send(&viewers, "4");
        assert_eq!(next(&mut slow).await, "all at 4");
        assert_eq!(viewers.metrics.missed.get(), 1);
    }

    #[tokio::test]
    async fn no_more_viewers_than_allowed_and_each_counts_until_it_leaves() {
        let (registry, viewers) = viewers(1);
        let first = viewers.join().unwrap();
        assert_eq!(viewers.join().unwrap_err(), Refused::TooMany(1));
        assert!(registry.text().contains("warmroute_dashboard_viewers 1"));
        assert!(viewers.are_there());
        drop(first);
        assert!(!viewers.are_there());
        assert!(registry.text().contains("warmroute_dashboard_viewers 0"));
        let refused = "warmroute_dashboard_viewers_refused_total 1";
        assert!(registry.text().contains(refused));
        viewers.set_max(2);
        let _both = [viewers.join().unwrap(), viewers.join().unwrap()];
    }

    #[tokio::test]
    async fn the_drain_ends_every_viewers_answer() {
        let (_, viewers) = viewers(2);
        let mut viewer = viewers.join().unwrap();
        viewers.close();
        assert!(viewer.frame().await.is_none());
        assert_eq!(viewers.join().unwrap_err(), Refused::Draining);
    }
}
