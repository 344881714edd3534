//! An endpoint of webhooks that is to learn of every end, and what it would get.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use prometheus::IntCounter;
use warmroute::store::memory::Memory;
use warmroute::store::outbox::{
    AddCounters, Bounds, Claim, ClaimedEvent, EventKey, EventType, Outbox, Subscriber,
    Subscriptions,
};
use warmroute::store::{ResponseKey, Status};

use super::store_harness::done;

const NAME: &str = "hook";

pub(super) fn subscribe(memory: &Memory) {
    let counter = || IntCounter::new("events", "-").unwrap();
    let subscriber = Subscriber {
        name: NAME.into(),
        fingerprint: "f".into(),
        tenant: None,
        events: EventType::ALL.to_vec(),
        added: Arc::default(),
        counters: AddCounters {
            added: counter(),
            dropped_full: counter(),
            dropped_disabled: counter(),
        },
    };
    memory.subscribe(Arc::new(Subscriptions {
        subscribers: vec![subscriber],
        bounds: Bounds::default(),
    }));
}

/// All events so far, by the response whose end they report. To be asked once.
pub(super) fn events(memory: &Memory) -> BTreeMap<ResponseKey, Status> {
    let claim = Claim {
        max: usize::MAX,
        lease: Duration::from_secs(1),
        fingerprint: "f".to_owned(),
        is_new_address: false,
    };
    let claimed = done(memory.claim(NAME, claim)).unwrap();
    let of = |claimed: ClaimedEvent| match claimed.event.key {
        EventKey::Response(key) => Some((key, Status::parse(claimed.event.event_type.status())?)),
        EventKey::Batch(_) => None,
    };
    claimed.events.into_iter().filter_map(of).collect()
}
