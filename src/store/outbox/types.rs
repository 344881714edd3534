//! Events of the outbox, and the arguments and results of the operations on it.

use std::time::Duration;

use super::event_key::EventKey;
use super::event_type::EventType;

/// A background response or a batch has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EndEvent {
    pub key: EventKey,
    pub event_type: EventType,
    /// When it ended, in Unix seconds.
    pub created_at: i64,
}

impl EndEvent {
    /// `None` if `status` is no end of such a thing.
    pub fn of(key: EventKey, status: &str, created_at: i64) -> Option<Self> {
        let event_type = EventType::of(key.subject(), status)?;
        Some(Self {
            key,
            event_type,
            created_at,
        })
    }
}

#[derive(Clone, Debug)]
pub struct Claim {
    /// Events at most.
    pub max: usize,
    /// What is not settled within this time can be claimed again.
    pub lease: Duration,
    /// The fingerprint of the endpoint as the caller knows it.
    pub fingerprint: String,
    /// Whether this is the first claim since the caller has read another address of the endpoint: then the fingerprint
    /// is the newest, also one that was claimed with before.
    pub is_new_address: bool,
}

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
    /// Events that were dropped now because the endpoint takes none.
    pub dropped_disabled: u64,
    /// Whether the endpoint takes no events.
    pub is_disabled: bool,
}

/// What becomes of an event that was claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settlement {
    pub key: EventKey,
    pub attempt: u32,
    /// When it is due again. `None`: it is delivered, or given up.
    pub retry_in: Option<Duration>,
}
