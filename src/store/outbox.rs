//! The outbox of webhooks: that a background response or a batch has ended, once for each endpoint that is to learn it,
//! until the endpoint has it.
//!
//! A store puts the event of a response into the outbox because it writes the end of the response, not because a
//! caller asks for it: an end and its events are one write. The event of a batch is added by the replica that has ended
//! the batch, or by any other until the batch's record says that it was added. The store has the events in one queue
//! for each endpoint. Any replica claims what is due for a time, delivers it, and settles it; what was claimed by a
//! replica that was lost is due again when that time is over. So an event is delivered at least once, and always with
//! the same id.

mod event_key;
mod event_type;
mod queue;
mod subscriptions;
mod types;

use std::fmt::Debug;
use std::sync::Arc;

pub use self::event_key::{BatchKey, EventKey};
pub use self::event_type::EventType;
pub(super) use self::queue::{Add, EventQueue, IN_USE, MAX_ADDRESSES, MAX_EXPIRED};
pub use self::subscriptions::{AddCounters, Bounds, Subscriber, Subscriptions};
pub use self::types::{Claim, Claimed, ClaimedEvent, EndEvent, Settlement};
use super::error::StoreFuture;

/// The operations of an outbox. An endpoint is known by its name.
pub trait Outbox: Send + Sync + Debug {
    /// From now on ends are for these endpoints.
    fn subscribe(&self, subscriptions: Arc<Subscriptions>);

    /// Puts the event into the queues of all endpoints that are to learn of it. One that is in a queue is not put there
    /// again.
    fn add(&self, event: EndEvent) -> StoreFuture<'_, ()>;

    /// Claims what is due for an endpoint. Events that are too old are dropped by the way.
    fn claim(&self, endpoint: &str, claim: Claim) -> StoreFuture<'_, Claimed>;

    /// Settles an event that was claimed. False if another claim has taken its place, or if it was dropped.
    fn settle(&self, endpoint: &str, settlement: Settlement) -> StoreFuture<'_, bool>;

    /// Takes no more events for the endpoint while it has this fingerprint, and drops those that wait; returns how many.
    /// Other replicas may claim with a fingerprint that is newer, because they have read a newer configuration: then
    /// nothing is dropped, events are taken on, and only claims with this fingerprint get none.
    fn disable(&self, endpoint: &str, fingerprint: &str) -> StoreFuture<'_, u64>;

    /// Takes events for the endpoint again, and lets claims with each fingerprint have them, also with one that was
    /// disabled while it was not the newest. False if all of them had events all along.
    fn enable(&self, endpoint: &str) -> StoreFuture<'_, bool>;
}
