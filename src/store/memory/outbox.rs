//! The outbox of webhooks in memory: a queue for each endpoint.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::store::Memory;
use crate::observe;
use crate::store::meters::Op;
use crate::store::outbox::{
    Add, Claim, Claimed, EndEvent, EventQueue, Outbox, Settlement, SharedSubscriptions,
    Subscriptions,
};
use crate::store::{ResponseKey, Status, StoreFuture};

#[derive(Debug)]
pub(super) struct Queues {
    started: Instant,
    subscriptions: SharedSubscriptions,
    by_endpoint: Mutex<HashMap<Arc<str>, EventQueue>>,
}

impl Queues {
    pub(super) fn new(started: Instant) -> Self {
        Self {
            started,
            subscriptions: SharedSubscriptions::default(),
            by_endpoint: Mutex::default(),
        }
    }

    fn ms(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.started).as_millis() as u64
    }

    /// To be called with the shard locked in which the end was written.
    pub(super) fn on_end(&self, now: Instant, key: ResponseKey, status: Status) {
        if self.subscriptions.is_empty() {
            return;
        }
        let subscriptions = self.subscriptions.get();
        let event = EndEvent {
            key,
            status,
            created_at: observe::unix_s(),
        };
        for subscriber in subscriptions.of(key.tenant, status) {
            let endpoint = &subscriber.endpoint;
            let added = {
                let mut queues = self.by_endpoint.lock();
                let queue = queues.entry(endpoint.name.clone()).or_default();
                queue.add(
                    self.ms(now),
                    event,
                    &endpoint.fingerprint,
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

    fn with<T: Default>(&self, endpoint: &str, change: impl FnOnce(&mut EventQueue) -> T) -> T {
        let mut queues = self.by_endpoint.lock();
        queues.get_mut(endpoint).map(change).unwrap_or_default()
    }
}

impl Outbox for Memory {
    fn subscribe(&self, subscriptions: Arc<Subscriptions>) {
        let mut queues = self.outbox.by_endpoint.lock();
        // No replica delivers what is for others.
        queues.retain(|name, _| subscriptions.find(name).is_some());
        self.outbox.subscriptions.set(subscriptions);
    }

    fn claim(&self, endpoint: &str, claim: Claim) -> StoreFuture<'_, Claimed> {
        let endpoint = endpoint.to_owned();
        self.operation(Op::ClaimEvents, move |now| {
            let bounds = self.outbox.subscriptions.get().bounds;
            let now = self.outbox.ms(now);
            let claim = |queue: &mut EventQueue| queue.claim(now, &claim, &bounds);
            Ok(self.outbox.with(&endpoint, claim))
        })
    }

    fn settle(&self, endpoint: &str, settlement: Settlement) -> StoreFuture<'_, bool> {
        let endpoint = endpoint.to_owned();
        self.operation(Op::SettleEvent, move |now| {
            let now = self.outbox.ms(now);
            let settle = |queue: &mut EventQueue| queue.settle(now, settlement);
            Ok(self.outbox.with(&endpoint, settle))
        })
    }

    fn disable(&self, endpoint: &str, fingerprint: &str) -> StoreFuture<'_, u64> {
        let (endpoint, fingerprint) = (endpoint.to_owned(), fingerprint.to_owned());
        self.operation(Op::DisableEndpoint, move |_| {
            let disable = |queue: &mut EventQueue| queue.disable(&fingerprint);
            Ok(self.outbox.with(&endpoint, disable))
        })
    }

    fn enable(&self, endpoint: &str) -> StoreFuture<'_, bool> {
        let endpoint = endpoint.to_owned();
        self.operation(Op::EnableEndpoint, move |_| {
            Ok(self.outbox.with(&endpoint, EventQueue::enable))
        })
    }
}
