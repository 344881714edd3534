//! The outbox of webhooks in memory: a queue for each endpoint.

use std::sync::Arc;

use super::store::Memory;
use crate::store::StoreFuture;
use crate::store::meters::Op;
use crate::store::outbox::{
    Claim, Claimed, EndEvent, EventQueue, Outbox, Settlement, Subscriptions,
};

impl Outbox for Memory {
    fn subscribe(&self, subscriptions: Arc<Subscriptions>) {
        let mut queues = self.outbox.by_endpoint.lock();
        // No replica delivers what is for others.
        queues.retain(|name, _| subscriptions.find(name).is_some());
        self.outbox.subscriptions.store(subscriptions);
    }

    fn add(&self, event: EndEvent) -> StoreFuture<'_, ()> {
        self.operation(Op::AddEvent, move |now| {
            self.outbox.add(now, event);
            Ok(())
        })
    }

    fn claim(&self, endpoint: &str, claim: Claim) -> StoreFuture<'_, Claimed> {
        let endpoint = endpoint.to_owned();
        self.operation(Op::ClaimEvents, move |now| {
            let bounds = self.outbox.subscriptions.load().bounds;
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
        self.operation(Op::DisableEndpoint, move |now| {
            let now = self.outbox.ms(now);
            let disable = |queue: &mut EventQueue| queue.disable(now, &fingerprint);
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
