//! The queues of webhooks' events in memory, one for each endpoint.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use crate::observe;
use crate::store::outbox::{Add, EndEvent, EventKey, EventQueue, Subscriptions};
use crate::store::{ResponseKey, Status};

#[derive(Debug)]
pub(super) struct Queues {
    started: Instant,
    /// Those of the latest configuration.
    pub(super) subscriptions: ArcSwap<Subscriptions>,
    pub(super) by_endpoint: Mutex<HashMap<Arc<str>, EventQueue>>,
}

impl Queues {
    pub(super) fn new(started: Instant) -> Self {
        Self {
            started,
            subscriptions: ArcSwap::default(),
            by_endpoint: Mutex::default(),
        }
    }

    pub(super) fn ms(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.started).as_millis() as u64
    }

    /// To be called with the shard locked in which the end was written.
    pub(super) fn on_end(&self, now: Instant, key: ResponseKey, status: Status) {
        if self.subscriptions.load().subscribers.is_empty() {
            return;
        }
        let key = EventKey::Response(key);
        if let Some(event) = EndEvent::of(key, status.as_str(), observe::unix_s()) {
            self.add(now, event);
        }
    }

    pub(super) fn add(&self, now: Instant, event: EndEvent) {
        let subscriptions = self.subscriptions.load_full();
        for subscriber in subscriptions.of(event) {
            let added = {
                let mut queues = self.by_endpoint.lock();
                let queue = queues.entry(subscriber.name.clone()).or_default();
                queue.add(
                    self.ms(now),
                    event,
                    &subscriber.fingerprint,
                    &subscriptions.bounds,
                )
            };
            match added {
                Add::Done { dropped } => {
                    subscriber.counters.added.inc();
                    subscriber.counters.dropped_full.inc_by(dropped);
                    subscriber.added.notify_one();
                }
                Add::Again => {}
                Add::Disabled => subscriber.counters.dropped_disabled.inc(),
            }
        }
    }

    pub(super) fn with<T: Default>(
        &self,
        endpoint: &str,
        change: impl FnOnce(&mut EventQueue) -> T,
    ) -> T {
        let mut queues = self.by_endpoint.lock();
        queues.get_mut(endpoint).map(change).unwrap_or_default()
    }
}
