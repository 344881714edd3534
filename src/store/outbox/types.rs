//! Events of the outbox, and the arguments and results of the operations on it.

use std::time::Duration;

use crate::store::keys::ResponseKey;
use crate::store::status::Status;

/// A background response has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EndEvent {
    pub key: ResponseKey,
    /// Terminal.
    pub status: Status,
    /// When it ended, in Unix seconds.
    pub created_at: i64,
}

/// What to claim.
#[derive(Clone, Debug)]
pub struct Claim {
    /// Events at most.
    pub max: usize,
    /// What is not settled within this time can be claimed again.
    pub lease: Duration,
    /// The fingerprint of the endpoint as the caller knows it.
    pub fingerprint: String,
}

/// An event to deliver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClaimedEvent {
    pub event: EndEvent,
    /// How often it was claimed, this time included. Its settlement names this number.
    pub attempt: u32,
    /// How long it has been in the outbox.
    pub age: Duration,
}

/// The result of a claim, and the state of the endpoint's queue after it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claimed {
    pub events: Vec<ClaimedEvent>,
    /// When the next event is due; `None` if there is none but those that were claimed now.
    pub next_due: Option<Duration>,
    /// Events in the queue, with those that are claimed.
    pub waiting: u64,
    /// The age of the oldest of them.
    pub oldest: Option<Duration>,
    /// Events that were dropped now because of their age.
    pub expired: u64,
    /// Whether the endpoint takes no events.
    pub is_disabled: bool,
}

/// What becomes of an event that was claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settlement {
    pub key: ResponseKey,
    pub attempt: u32,
    /// When it is due again. `None`: it is delivered, or given up.
    pub retry_in: Option<Duration>,
}
