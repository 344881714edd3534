//! Arguments and outcomes of the operations on conversations.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::keys::{ConversationKey, IdempotencyToken};

/// How many idempotency tokens a conversation remembers, of additions and of commits each. A write repeated
/// after more others than this is applied again.
pub(super) const TOKENS_MAX: usize = 16;

/// One item of a conversation; the store interprets only its id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    pub id: Arc<str>,
    pub json: Bytes,
}

#[derive(Clone, Debug)]
pub struct NewConversation {
    pub token: IdempotencyToken,
    pub object: Bytes,
    pub items: Vec<Item>,
}

/// Outcome of adding items to a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum PutOutcome {
    /// Done now, or before, by a write with the same token.
    Done,
    /// No such conversation.
    Gone,
    /// An item with this id exists already, or the batch contains it twice. Nothing was written.
    Taken(Arc<str>),
    /// Only of a commit: the caller does not hold the lock (its lease has expired, and another response took
    /// the lock). Nothing was written.
    Unlocked,
}

/// Why a conversation did not accept the items of a response, as [`PutOutcome`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitRefusal {
    Gone,
    Unlocked,
    Taken,
    /// With them it would exceed the maximum size of a conversation.
    TooLarge,
    /// The store has lost a part of it.
    Damaged,
}

impl PutOutcome {
    /// Why nothing was written; `None` if it was.
    pub fn refusal(&self) -> Option<CommitRefusal> {
        match self {
            Self::Done => None,
            Self::Gone => Some(CommitRefusal::Gone),
            Self::Taken(_) => Some(CommitRefusal::Taken),
            Self::Unlocked => Some(CommitRefusal::Unlocked),
        }
    }
}

/// The items that a response leaves in its conversation, written together with its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commit {
    /// Has the root and the tenant of the response.
    pub conversation: ConversationKey,
    /// The token of the lock, which this ends.
    pub token: IdempotencyToken,
    pub items: Vec<Item>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum LockOutcome {
    /// The caller holds the lock until it commits or unlocks, or the lease expires.
    Locked,
    /// Another response holds the lock.
    Busy,
    /// Only of a renewal: the caller no longer holds the lock. Another response may have added its turn since.
    Lost,
    /// No such conversation.
    Gone,
}

/// A request for the lock, or for its renewal: its holder, and the lease from now. Repeating it with the same token
/// extends the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    pub token: IdempotencyToken,
    pub lease: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    OldestFirst,
    NewestFirst,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// Return items after this one in the given order; from the start if `None`.
    pub after: Option<Arc<str>>,
    pub limit: u32,
    pub order: Order,
}

#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum ItemsOutcome {
    Found {
        items: Vec<Item>,
        has_more: bool,
    },
    /// No such conversation.
    Gone,
    /// `after` names no item of the conversation.
    UnknownAfter,
    /// All items together exceed the caller's limit.
    TooLarge {
        bytes: u64,
    },
}

/// Outcome of reading or deleting one item.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum ItemOutcome {
    Found(Bytes),
    /// The conversation exists, the item does not.
    NoItem,
    /// No such conversation.
    Gone,
}
