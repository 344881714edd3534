//! Webhooks: the end of a background response or a batch is reported to the endpoints that its tenant's operator
//! configured, as OpenAI does it and in the signatures of Standard Webhooks.
//!
//! The store's outbox has the events, written with the ends that they report (`store/outbox.rs`); here they are
//! delivered. Each replica claims what is due and sends it; what becomes of an event after an attempt is decided in
//! `retry`, where an endpoint may be is decided in `address`. An event has no content but the id: a receiver
//! retrieves the response or batch with a key of its own.

mod address;
mod attempt;
mod client;
mod deliverer;
mod endpoint;
mod event;
mod metrics;
mod report;
mod retry;
mod settings;
mod signature;
mod target;

pub use self::deliverer::Webhooks;
pub use self::report::EndpointReport;
pub use self::settings::{Advanced, EndpointSettings, KnownTenants, Settings};
pub use crate::store::outbox::EventType;
