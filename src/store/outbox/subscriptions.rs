//! Which endpoints learn of which ends.

use std::sync::Arc;
use std::time::Duration;

use prometheus::IntCounter;
use tokio::sync::Notify;

use super::event_type::EventType;
use super::types::EndEvent;
use crate::ids::Tenant;

/// How much is kept for one endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// If there are more events, the oldest are dropped.
    pub max_events: u64,
    /// Older events are dropped.
    pub max_age: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            max_events: 10_000,
            max_age: Duration::from_secs(72 * 3_600),
        }
    }
}

/// What became of events that were added here.
#[derive(Clone, Debug)]
pub struct AddCounters {
    pub added: IntCounter,
    /// Older events that made room.
    pub dropped_full: IntCounter,
    pub dropped_disabled: IntCounter,
}

/// An endpoint, and which events are for it.
#[derive(Clone, Debug)]
pub struct Subscriber {
    pub name: Arc<str>,
    /// Changes with the endpoint's address, so that one which was disabled takes events again under another address.
    pub fingerprint: Arc<str>,
    /// `None`: of all tenants.
    pub tenant: Option<Tenant>,
    pub events: Vec<EventType>,
    /// Notified when an event was added here.
    pub added: Arc<Notify>,
    pub counters: AddCounters,
}

/// All endpoints of one configuration.
#[derive(Clone, Debug, Default)]
pub struct Subscriptions {
    pub subscribers: Vec<Subscriber>,
    pub bounds: Bounds,
}

impl Subscriptions {
    /// The endpoints that learn of an end.
    pub fn of(&self, event: EndEvent) -> impl Iterator<Item = &Subscriber> {
        let tenant = event.key.tenant();
        self.subscribers.iter().filter(move |subscriber| {
            let is_of_tenant = subscriber.tenant.is_none_or(|of| of == tenant);
            is_of_tenant && subscriber.events.contains(&event.event_type)
        })
    }

    pub(crate) fn find(&self, endpoint: &str) -> Option<&Subscriber> {
        let mut found = self.subscribers.iter();
        found.find(|subscriber| *subscriber.name == *endpoint)
    }
}
