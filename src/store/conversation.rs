//! What a store is told and tells of conversations.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::record::IdempotencyToken;

/// Writes that a conversation remembers by their tokens, of additions and of commits: one that is repeated
/// after so many others is not known again.
pub(super) const TOKENS_MAX: usize = 16;

/// One item of a conversation; the store looks at its id alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    pub id: Arc<str>,
    pub json: Bytes,
}

#[derive(Clone, Debug)]
pub struct NewConversation {
    pub token: IdempotencyToken,
    /// The conversation object.
    pub object: Bytes,
    pub items: Vec<Item>,
}

/// Outcome of putting items into a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum PutOutcome {
    /// Done now, or before, by a write with the same token.
    Done,
    /// No such conversation.
    Gone,
    /// An item of this id is there already, or comes twice. Nothing was written.
    Taken(Arc<str>),
    /// [`super::ResponseStore::commit`] alone: the lock is not the caller's, its lease has run out and
    /// another may have it. Nothing was written.
    Unlocked,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum LockOutcome {
    /// The caller's until it commits or unlocks, or its lease runs out.
    Locked,
    /// Another response runs on it.
    Busy,
    /// No such conversation.
    Gone,
}

/// A lock's holder, and for how long from now. Asking again with the same token extends it.
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
    /// Items beyond this one in the asked order; from its start if `None`.
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
    /// `after` names no item of it.
    UnknownAfter,
    /// All items together have more bytes than the caller takes.
    TooLarge {
        bytes: u64,
    },
}

/// Outcome of asking for, or deleting, one item.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum ItemOutcome {
    Found(Bytes),
    /// The conversation is there, the item is not.
    NoItem,
    /// No such conversation.
    Gone,
}
