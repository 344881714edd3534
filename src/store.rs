//! What is kept of responses and conversations between requests, so that any replica can answer for
//! any of them: the trait with its contract. `memory` and `redis` keep it; one suite holds both to it.
//!
//! # The contract
//!
//! 1. **Only `create` makes a record, and never over another one.** Every other write of a response
//!    that is not there answers `Gone` and leaves it so: a late writer brings nothing back.
//! 2. **A terminal status is for ever.** Transitions are compare-and-set on the status (see
//!    [`Status::may_become`]); of a cancel and a finalize that race, one wins, and both callers learn
//!    which. There is one terminal event.
//! 3. **Owner and epoch fence.** A write of a running response carries its [`Fence`]; after an adoption
//!    or a release the old one's writes answer `Fenced` and change nothing.
//! 4. **Events are numbered without holes.** An append that does not begin where the log ends changes
//!    nothing and says where it ends.
//! 5. **A tenant is part of the key.** What another tenant owns is not there.
//! 6. **Not there is never said of a store that could not be asked**: that is an [`Error`]. Where a
//!    write may or may not have been done, it is [`Error::Unknown`]; the same write with the same
//!    token is then safe to repeat, and told as done if it had been.
//! 7. **A history is whole or is not given.** One missing link makes it `Missing`.
//! 8. **What runs is never evicted** to make room; a store full of running work refuses more of it
//!    ([`Error::Full`]). Finished records may be forgotten, by age or for room.
//! 9. **A future that is dropped may or may not have done its write**, as with `Unknown`.

pub mod cancel;
pub mod conversation;
pub mod lease;
pub mod log;
pub mod memory;
mod meters;
pub mod record;
pub mod redis;
mod settings;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use bytes::Bytes;
use serde::Serialize;

pub use self::cancel::{Notice, NoticeCursor};
pub use self::conversation::{
    Claim, Item, ItemOutcome, ItemsOutcome, LockOutcome, NewConversation, Page, PutOutcome,
};
pub use self::log::{EventBatch, LoggedEvents};
pub use self::record::{
    CancelOutcome, Cancellation, CancelledOutput, Chain, DeleteOutcome, FencingToken, Finalization,
    IdempotencyToken, NewRecord, Owner, Record, RoutingHint, Status, Takeover, WriteOutcome,
};
pub use self::settings::{Keep, Kind, Settings};
use crate::ids::{ConversationId, ResponseId, Tenant};
use crate::observe::metrics::Registry;

/// A response, as its tenant may ask for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ResponseKey {
    pub tenant: Tenant,
    pub id: ResponseId,
}

/// A conversation, as its tenant may ask for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConversationKey {
    pub tenant: Tenant,
    pub id: ConversationId,
}

/// All turns of a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum History {
    Found(Turns),
    /// This one of the chain is not there (deleted, expired, another tenant's, never was, or kept for
    /// polling only).
    Missing(ResponseId),
    /// The asked one still runs.
    Running(Status),
    /// The asked one failed or was cancelled, and is nobody's past.
    Ended(Status),
    /// The chain goes beyond the caller's limits. Nothing of it was read.
    TooLarge {
        turns: usize,
        bytes: u64,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turns {
    /// Oldest first; the last is the asked one.
    pub turns: Vec<Turn>,
    /// For the record that continues it.
    pub chain: Chain,
    /// Of the asked one.
    pub hint: RoutingHint,
}

/// Two JSON arrays of items.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    pub input: Bytes,
    pub output: Bytes,
}

/// How long a history the caller takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistoryLimits {
    pub turns: usize,
    pub bytes: u64,
}

/// A response that an owner ran and has lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnershipLoss {
    Gone,
    Fenced,
    Terminal(Status),
}

/// A running response whose owner's lease has run out, or that was released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Orphan {
    pub key: ResponseKey,
    /// What [`ResponseStore::adopt`] compares with.
    pub owner: Option<Owner>,
    pub fencing_number: u64,
}

/// Why a store could not do as it was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// It could not be asked, and nothing was done.
    Unavailable {
        retry_after: Duration,
        reason: Arc<str>,
    },
    /// It was asked and did not answer in time: a write may or may not have been done.
    Unknown {
        retry_after: Duration,
        reason: Arc<str>,
    },
    /// No room, and nothing that could make way. Nothing was done.
    Full { retry_after: Duration },
    /// The value is larger than the store's settings allow, now and at any time.
    TooLarge { bytes: u64, max: u64 },
    /// `create`: the id is taken by a record with another token.
    Exists,
    /// The record was written by a release that this one cannot read, or is damaged.
    Unreadable(Arc<str>),
}

impl Error {
    /// When to try again, if that may help.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Unavailable { retry_after, .. }
            | Self::Unknown { retry_after, .. }
            | Self::Full { retry_after } => Some(*retry_after),
            Self::TooLarge { .. } | Self::Exists | Self::Unreadable(_) => None,
        }
    }

    /// For the `outcome` label of metrics.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Unavailable { .. } => "unavailable",
            Self::Unknown { .. } => "unknown",
            Self::Full { .. } => "full",
            Self::TooLarge { .. } => "too_large",
            Self::Exists => "exists",
            Self::Unreadable(_) => "unreadable",
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unavailable { reason, .. } => {
                write!(f, "the response store is unavailable: {reason}")
            }
            Self::Unknown { reason, .. } => {
                write!(
                    f,
                    "the response store did not say whether it wrote: {reason}"
                )
            }
            Self::Full { .. } => f.write_str("the response store is full of running responses"),
            Self::TooLarge { bytes, max } => {
                write!(
                    f,
                    "{bytes} bytes are more than the {max} a response may have in the store"
                )
            }
            Self::Exists => f.write_str("the id is taken"),
            Self::Unreadable(reason) => write!(f, "the stored record cannot be read: {reason}"),
        }
    }
}

impl std::error::Error for Error {}

/// Whether the store answers, as far as is known without asking it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Health {
    pub is_up: bool,
    /// What was wrong last; empty when it is up.
    pub reason: String,
}

/// What an operator is shown.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub kind: &'static str,
    pub health: Health,
    /// Whatever this kind of store can tell of itself: counts, bytes and bounds, nodes, scripts.
    pub details: serde_json::Value,
}

/// What a store's method returns. It needs a tokio runtime to be polled on, any of the process; once begun
/// on a carrier it must stay there. Dropping it may leave what it asked for done or undone.
pub type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send + 'a>>;

/// Makes the store that the settings ask for, for a process with so many carriers. One in Redis connects
/// when it is first asked.
pub fn open(
    settings: &Settings,
    carriers: usize,
    registry: &Registry,
) -> io::Result<Arc<dyn ResponseStore>> {
    Ok(match settings.kind {
        Kind::Memory => Arc::new(memory::Memory::new(
            &settings.memory,
            &settings.keep,
            registry,
        )),
        Kind::Redis => Arc::new(redis::Redis::open(
            &settings.redis,
            &settings.keep,
            carriers,
            registry,
        )?),
    })
}

/// See the module's contract.
pub trait ResponseStore: Send + Sync + fmt::Debug {
    /// Whether work that will be stored should begin: asked before anything is started, so that a
    /// store that is down or full of running work costs no GPU time. Cheap while the store answers.
    fn admit(&self) -> StoreFuture<'_, ()>;

    /// Makes a record, in one write. [`Error::Exists`] if the id is taken, but by the same token.
    fn create(&self, key: ResponseKey, record: NewRecord) -> StoreFuture<'_, ()>;

    /// The record, without its input.
    fn get(&self, key: ResponseKey) -> StoreFuture<'_, Option<Record>>;

    /// The JSON array of the response's own input items. `None` also for what is kept for polling only.
    fn input(&self, key: ResponseKey) -> StoreFuture<'_, Option<Bytes>>;

    /// All input and output of the chain that ends with `key`, in two reads at most.
    fn history(&self, key: ResponseKey, max: HistoryLimits) -> StoreFuture<'_, History>;

    /// Forgets the response, whatever its status. Its running owner is sent a notice.
    fn delete(&self, key: ResponseKey) -> StoreFuture<'_, DeleteOutcome>;

    /// Queued to in progress. `Done` also when it is in progress under the same fence.
    fn start(&self, key: ResponseKey, fence: FencingToken) -> StoreFuture<'_, WriteOutcome>;

    /// Adds events to the log. A batch that was appended before and comes again is `Duplicate`.
    fn append(
        &self,
        key: ResponseKey,
        fence: FencingToken,
        batch: EventBatch,
    ) -> StoreFuture<'_, WriteOutcome>;

    /// Ends it: status, content, last events and cut table in one write, unless it has ended.
    fn finalize(
        &self,
        key: ResponseKey,
        fence: FencingToken,
        end: Finalization,
    ) -> StoreFuture<'_, WriteOutcome>;

    /// Ends a background response that still runs, and sends its owner a notice.
    fn cancel(&self, key: ResponseKey, cancel: Cancellation) -> StoreFuture<'_, CancelOutcome>;

    /// Adds the partial output to a response that was cancelled while `fence` ran it; once. Anything
    /// else is refused as [`Cas`] says; an amended one is `Terminal(Cancelled)`.
    fn finalize_cancelled(
        &self,
        key: ResponseKey,
        fence: FencingToken,
        amend: CancelledOutput,
    ) -> StoreFuture<'_, WriteOutcome>;

    /// Events with numbers beyond `after` (all if `None`), up to about `bytes_max` at once. `None` for
    /// what is not there or is no background response.
    fn events(
        &self,
        key: ResponseKey,
        after: Option<u64>,
        bytes_max: u64,
    ) -> StoreFuture<'_, Option<LoggedEvents>>;

    /// Renews the owner's lease for `lease` from now. `name` is for operators.
    fn heartbeat(&self, owner: Owner, name: &str, lease: Duration) -> StoreFuture<'_, ()>;

    /// Ends the owner's lease: what it still runs is an orphan at once.
    fn end_lease(&self, owner: Owner) -> StoreFuture<'_, ()>;

    /// Which of these the caller no longer owns, or have ended.
    fn check_ownership(
        &self,
        running: Vec<(ResponseKey, FencingToken)>,
    ) -> StoreFuture<'_, Vec<(ResponseKey, OwnershipLoss)>>;

    /// Running responses that nobody runs, up to about `max`.
    fn orphans(&self, max: usize) -> StoreFuture<'_, Vec<Orphan>>;

    /// What `owner` has in the store as its own and is not among `running`, up to about `max`: for an owner
    /// that is not sure whether it runs all that it has.
    fn untracked(
        &self,
        owner: Owner,
        running: Vec<ResponseKey>,
        max: usize,
    ) -> StoreFuture<'_, Vec<(ResponseKey, FencingToken)>>;

    /// Takes an orphan over if it is still as `orphan` says and its owner's lease has run out.
    fn take_over(&self, orphan: Orphan, by: Owner) -> StoreFuture<'_, Takeover>;

    /// Hands a running response back, to be adopted by anyone at once.
    fn release(&self, key: ResponseKey, fence: FencingToken) -> StoreFuture<'_, WriteOutcome>;

    /// Notices to `owner` beyond `after`, with the cursor to go on from. To be asked every 50 ms or so
    /// by who runs something; a lost notice is made up for by `check`.
    fn notices(
        &self,
        owner: Owner,
        after: NoticeCursor,
    ) -> StoreFuture<'_, (Vec<Notice>, NoticeCursor)>;

    /// Makes a conversation. [`Error::Exists`] as with `create`; item ids must differ.
    fn create_conversation(
        &self,
        key: ConversationKey,
        new: NewConversation,
    ) -> StoreFuture<'_, ()>;

    /// The conversation object.
    fn conversation(&self, key: ConversationKey) -> StoreFuture<'_, Option<Bytes>>;

    /// Replaces the conversation object. False: there is no such conversation.
    fn update_conversation(&self, key: ConversationKey, object: Bytes) -> StoreFuture<'_, bool>;

    /// Forgets it with its items. False: there was no such conversation.
    fn delete_conversation(&self, key: ConversationKey) -> StoreFuture<'_, bool>;

    /// Puts items at its end, locked or not.
    fn add_items(
        &self,
        key: ConversationKey,
        token: IdempotencyToken,
        items: Vec<Item>,
    ) -> StoreFuture<'_, PutOutcome>;

    /// Some of its items.
    fn items(&self, key: ConversationKey, page: Page) -> StoreFuture<'_, ItemsOutcome>;

    /// All of its items, oldest first, unless they have more than `bytes_max` together.
    fn all_items(&self, key: ConversationKey, bytes_max: u64) -> StoreFuture<'_, ItemsOutcome>;

    fn item(&self, key: ConversationKey, item: &str) -> StoreFuture<'_, ItemOutcome>;

    /// Deletes an item. `Found` is the conversation object then.
    fn delete_item(&self, key: ConversationKey, item: &str) -> StoreFuture<'_, ItemOutcome>;

    /// Takes the conversation for one running response.
    fn lock(&self, key: ConversationKey, claim: Claim) -> StoreFuture<'_, LockOutcome>;

    /// Puts the response's items at its end and unlocks it, in one write.
    fn commit(
        &self,
        key: ConversationKey,
        token: IdempotencyToken,
        items: Vec<Item>,
    ) -> StoreFuture<'_, PutOutcome>;

    /// Unlocks it if the lock is the token's.
    fn unlock(&self, key: ConversationKey, token: IdempotencyToken) -> StoreFuture<'_, ()>;

    /// As far as is known without asking: for readiness.
    fn health(&self) -> Health;

    /// For operators.
    fn report(&self) -> StoreFuture<'_, Report>;
}
