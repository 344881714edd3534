//! [`ResponseStore`], the operations of a response store, and what callers may rely on. The operations on responses,
//! on background responses, on their ownership and on conversations are a trait each. Those on documents of the Batch
//! API have theirs, with its contract, in `documents`.
//!
//! # The contract
//!
//! 1. **Only `create` creates a record, and it never overwrites one.** Every other write to a missing response
//!    returns `Gone` and creates nothing, so a late writer cannot resurrect a deleted response.
//! 2. **A terminal status is final.** Transitions are compare-and-set on the status (see
//!    [`Status::may_become`](super::status::Status::may_become)). If a cancel and a finalize race, one wins, and both callers learn which. A
//!    response has exactly one terminal event.
//! 3. **Fencing.** A write to a running response carries its [`FencingToken`]. After a takeover or a release,
//!    writes with the old token return `Fenced` and change nothing.
//! 4. **Event numbers have no gaps.** An append that does not start where the log ends changes nothing and
//!    returns where the log ends.
//! 5. **The tenant is part of the key.** Responses of other tenants do not exist for the caller.
//! 6. **An unreachable store is an [`Error`]**, never `Gone` or `None`. If a write may or may not have been
//!    applied, the error is [`Error::Unknown`]; repeating the write with the same [`IdempotencyToken`] is safe,
//!    and succeeds if the first one was applied.
//! 7. **A history is complete or not returned.** One missing turn makes it `Missing`.
//! 8. **Running responses are never evicted.** A store full of running responses refuses new ones
//!    ([`Error::Full`]). Finished records are dropped by age, or to make room.
//! 9. **A response is kept with everything that it continues.** It can be continued exactly while it and all responses
//!    of its chain are stored. Reading a history, a create and [`Responses::keep_chain`] extend the retention of the
//!    chain, so that a response that is kept long loses none of it by age. A create that continues a response that is
//!    missing is [`Error::BrokenChain`] and writes nothing.
//! 10. **A dropped future may or may not have applied its write**, as with `Unknown`.
//!
//! [`Error`]: super::error::Error
//! [`Error::BrokenChain`]: super::error::Error::BrokenChain
//! [`Error::Full`]: super::error::Error::Full
//! [`Error::Unknown`]: super::error::Error::Unknown

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::cancel::{Notice, NoticeCursor};
use super::conversation::{
    Claim, Commit, Item, ItemOutcome, ItemsOutcome, LockOutcome, NewConversation, Page, PutOutcome,
};
use super::documents::Documents;
use super::error::StoreFuture;
use super::history::{History, HistoryLimits};
use super::keys::{ConversationKey, ResponseKey};
use super::log::LoggedEvents;
use super::ownership::{FencingToken, Orphan, Owner, OwnershipLoss, Takeover};
use super::record::{
    CancelOutcome, Cancellation, CancelledOutput, DeleteOutcome, EventBatch, Finalization,
    IdempotencyToken, NewRecord, Record, WriteOutcome,
};
use crate::ids::ResponseId;

/// Whether the store was reachable at its last use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    pub is_up: bool,
    /// The last failure; empty while the store is up.
    pub reason: String,
    /// What is wrong with the settings of the store's server; empty for nothing.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub warning: String,
}

/// The state of the store, for operators.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub kind: &'static str,
    pub health: Health,
    /// Depends on the kind of store: counts, sizes and limits, nodes, scripts.
    pub details: serde_json::Value,
}

/// The operations of a store; the module's documentation states their contract.
pub trait ResponseStore:
    Responses + BackgroundResponses + Ownership + Conversations + Documents + Send + Sync + fmt::Debug
{
    /// Checks that a response could be stored, before generation starts, so that a store that is down or full
    /// costs no GPU time. Sends nothing while the store answered recently.
    fn admit(&self) -> StoreFuture<'_, ()>;

    /// For readiness probes; sends nothing.
    fn health(&self) -> Health;

    fn report(&self) -> StoreFuture<'_, Report>;
}

/// The operations on responses, whether they run or have ended.
pub trait Responses {
    /// Creates a record in one write, and extends the retention of all that it continues. [`Error::Exists`] if the id
    /// belongs to a record with another token; [`Error::BrokenChain`] if any of what it continues is missing.
    ///
    /// [`Error::BrokenChain`]: super::error::Error::BrokenChain
    /// [`Error::Exists`]: super::error::Error::Exists
    fn create(&self, key: ResponseKey, record: NewRecord) -> StoreFuture<'_, ()>;

    /// As `create`, for a response that has ended in a conversation: its record and its items in one write. Unless it
    /// is `Done`, nothing was written.
    fn create_in_conversation(
        &self,
        key: ResponseKey,
        record: NewRecord,
        commit: Commit,
    ) -> StoreFuture<'_, PutOutcome>;

    /// Returns the record without its input.
    fn get(&self, key: ResponseKey) -> StoreFuture<'_, Option<Record>>;

    /// Returns the JSON array of the response's own input items; `None` also for an ephemeral response.
    fn input(&self, key: ResponseKey) -> StoreFuture<'_, Option<Bytes>>;

    /// Returns the request of a background response, as given to the create; `None` once it has ended. A cancelled
    /// one keeps it until its partial output is stored.
    fn request(&self, key: ResponseKey) -> StoreFuture<'_, Option<Bytes>>;

    /// Returns all input and output of the chain that ends with `key`, and extends the retention of what is before it.
    fn history(&self, key: ResponseKey, max: HistoryLimits) -> StoreFuture<'_, History>;

    /// Extends the retention of the response and of all that it continues. Returns the newest of them that is missing.
    fn keep_chain(&self, key: ResponseKey) -> StoreFuture<'_, Option<ResponseId>>;

    /// Deletes the response, whatever its status, and sends a notice to the owner that runs it.
    fn delete(&self, key: ResponseKey) -> StoreFuture<'_, DeleteOutcome>;
}

/// What is written to a background response while it runs, and its events.
pub trait BackgroundResponses {
    /// Changes the status from queued to in progress. `Done` also if this was done before with the same token.
    fn start(&self, key: ResponseKey, fence: FencingToken) -> StoreFuture<'_, WriteOutcome>;

    /// Appends events to the log. A repeated batch is `Duplicate`.
    fn append(
        &self,
        key: ResponseKey,
        fence: FencingToken,
        batch: EventBatch,
    ) -> StoreFuture<'_, WriteOutcome>;

    /// Ends the response, unless it has ended: status, content, last events, delta table and the items of its
    /// conversation in one write, or nothing of it.
    fn finalize(
        &self,
        key: ResponseKey,
        fence: FencingToken,
        end: Finalization,
    ) -> StoreFuture<'_, WriteOutcome>;

    /// Cancels a background response that still runs, and sends its owner a notice.
    fn cancel(&self, key: ResponseKey, cancel: Cancellation) -> StoreFuture<'_, CancelOutcome>;

    /// Adds the partial output to a response that was cancelled while its owner ran it, once. Refused like any
    /// other write; the second attempt is `Terminal(Cancelled)`.
    fn finalize_cancelled(
        &self,
        key: ResponseKey,
        fence: FencingToken,
        output: CancelledOutput,
    ) -> StoreFuture<'_, WriteOutcome>;

    /// Returns events after the number `after` (all if `None`), about `bytes_max` at most, without the batches'
    /// tokens. `None` if there is no such background response.
    fn events(
        &self,
        key: ResponseKey,
        after: Option<u64>,
        bytes_max: u64,
    ) -> StoreFuture<'_, Option<LoggedEvents>>;

    /// As `events`, with the batches' tokens, for a replica that has taken the response over.
    fn events_with_tokens(
        &self,
        key: ResponseKey,
        after: Option<u64>,
        bytes_max: u64,
    ) -> StoreFuture<'_, Option<LoggedEvents>>;
}

/// Which replica runs a background response: leases of owners, orphans, takeovers and notices.
pub trait Ownership {
    /// Renews the owner's lease until `lease` from now. `name` identifies the replica to operators.
    fn heartbeat(&self, owner: Owner, name: &str, lease: Duration) -> StoreFuture<'_, ()>;

    /// Ends the owner's lease: everything that it still runs becomes an orphan at once.
    fn end_lease(&self, owner: Owner) -> StoreFuture<'_, ()>;

    /// Returns which of these responses have ended or no longer belong to the caller.
    fn check_ownership(
        &self,
        running: Vec<(ResponseKey, FencingToken)>,
    ) -> StoreFuture<'_, Vec<(ResponseKey, OwnershipLoss)>>;

    /// Scans for orphans, about `max` at most: running responses without a live owner, and cancelled ones whose
    /// owner was lost before it stored the output that readers had received. Which ones, if there are more, is random,
    /// so that those that the caller cannot take hide no others.
    fn orphans(&self, max: usize) -> StoreFuture<'_, Vec<Orphan>>;

    /// Returns responses that the store assigns to `owner` but that are not in `running`, about `max` at most.
    /// An owner may not know of them because the reply to its create or takeover was lost.
    fn untracked(
        &self,
        owner: Owner,
        running: Vec<ResponseKey>,
        max: usize,
    ) -> StoreFuture<'_, Vec<(ResponseKey, FencingToken)>>;

    /// Takes an orphan over, if its owner and fencing number are unchanged and the owner's lease has expired.
    fn take_over(&self, orphan: Orphan, by: Owner) -> StoreFuture<'_, Takeover>;

    /// Gives up a response that the caller owns and that has work left (as for [`Self::orphans`]), so that any
    /// replica can take it over at once.
    fn release(&self, key: ResponseKey, fence: FencingToken) -> StoreFuture<'_, WriteOutcome>;

    /// Returns the notices to `owner` after the cursor, and the new cursor. Owners poll this about every 50 ms
    /// while they run something; `check_ownership` covers for lost notices.
    fn notices(
        &self,
        owner: Owner,
        after: NoticeCursor,
    ) -> StoreFuture<'_, (Vec<Notice>, NoticeCursor)>;
}

pub trait Conversations {
    /// Creates a conversation. [`Error::Exists`] as with `create`; item ids must be distinct.
    ///
    /// [`Error::Exists`]: super::error::Error::Exists
    fn create_conversation(
        &self,
        key: ConversationKey,
        new: NewConversation,
    ) -> StoreFuture<'_, ()>;

    fn conversation(&self, key: ConversationKey) -> StoreFuture<'_, Option<Bytes>>;

    /// Replaces the conversation object. False if there is no such conversation.
    fn update_conversation(&self, key: ConversationKey, object: Bytes) -> StoreFuture<'_, bool>;

    /// Deletes a conversation and its items. False if there was no such conversation.
    fn delete_conversation(&self, key: ConversationKey) -> StoreFuture<'_, bool>;

    /// Appends items, whether the conversation is locked or not.
    fn add_items(
        &self,
        key: ConversationKey,
        token: IdempotencyToken,
        items: Vec<Item>,
    ) -> StoreFuture<'_, PutOutcome>;

    fn items(&self, key: ConversationKey, page: Page) -> StoreFuture<'_, ItemsOutcome>;

    /// Returns all of its items, oldest first, unless they exceed `bytes_max` together.
    fn all_items(&self, key: ConversationKey, bytes_max: u64) -> StoreFuture<'_, ItemsOutcome>;

    fn item(&self, key: ConversationKey, item: &str) -> StoreFuture<'_, ItemOutcome>;

    /// Deletes an item; `Found` contains the conversation object.
    fn delete_item(&self, key: ConversationKey, item: &str) -> StoreFuture<'_, ItemOutcome>;

    /// Locks the conversation for one running response.
    fn lock(&self, key: ConversationKey, claim: Claim) -> StoreFuture<'_, LockOutcome>;

    /// Extends the lease of the lock, which may have run out, for the response that holds it. `Lost` if it does not:
    /// a lock that another response had in between is not taken back, because what its holder read is outdated.
    fn renew_lock(&self, key: ConversationKey, claim: Claim) -> StoreFuture<'_, LockOutcome>;

    /// Appends the response's items and unlocks the conversation, in one write.
    fn commit(&self, commit: Commit) -> StoreFuture<'_, PutOutcome>;

    /// Unlocks the conversation if the token holds the lock.
    fn unlock(&self, key: ConversationKey, token: IdempotencyToken) -> StoreFuture<'_, ()>;
}
