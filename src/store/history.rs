//! The history of a response: its own input and output items, and those of all responses that it continues.

use bytes::Bytes;

use super::record::{Chain, RoutingHint};
use super::status::Status;
use crate::ids::ResponseId;

/// Outcome of reading all turns up to a response.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum History {
    Found(Turns),
    /// This response of the chain is missing: deleted, expired, of another tenant, or ephemeral (stored for
    /// polling only).
    Missing(ResponseId),
    /// The requested response still runs.
    Running(Status),
    /// The requested response failed or was cancelled; such a response cannot be continued.
    Ended(Status),
    /// The chain exceeds the caller's limits. It was not read.
    TooLarge {
        turns: usize,
        bytes: u64,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turns {
    /// Oldest first; the last is the requested response.
    pub turns: Vec<Turn>,
    /// What a record that continues this response stores as its parent.
    pub chain: Chain,
    /// The routing hint of the requested response.
    pub hint: RoutingHint,
}

/// The items of one response, as two JSON arrays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    pub input: Bytes,
    pub output: Bytes,
}

/// The longest history that the caller accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistoryLimits {
    pub turns: usize,
    pub bytes: u64,
}
