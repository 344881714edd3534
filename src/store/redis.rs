//! The store in Redis, shared by all replicas: one server, a master found through sentinels, or a cluster.
//!
//! A response is one hash, plus a stream for its events. All keys of a chain, and of a conversation with its
//! responses, have the hash tag `{tenant:root}`, so a cluster keeps them in one slot. Each transition is one
//! script (`redis/*.lua`; `redis/common.lua` documents the record). Data that spans slots (which owner runs
//! which responses, notices) is written by separate commands, ordered so that a crash in between leaves only
//! entries that a later scan removes.
//!
//! `redis/executor.rs` sends the commands. An operation on an I/O thread uses that thread's own connection, so no
//! other thread is woken. Other threads, and all operations on a cluster, use a connection on the store's own
//! thread.

mod background;
mod breaker;
mod breakers;
mod charges;
mod client;
mod conversation_items;
mod conversations;
mod executor;
mod failure;
mod keys;
mod lacking;
mod link;
mod notices;
mod outbox;
mod owners;
mod packed;
mod replica_wait;
mod reply;
mod request;
mod responses;
mod scripts;
mod settings;
mod takeover;
mod target;
mod timer_anchor;
mod values;

use std::time::Duration;

use bytes::Bytes;

pub use self::charges::ChargeKeys;
pub use self::client::Redis;
use self::conversations::PutKind;
pub use self::settings::{
    Advanced, CircuitBreaker, Mode, Settings, Tls, UrlOrMap, Wait, url_or_map,
};
use super::meters::Op;
use super::{
    CancelOutcome, Cancellation, CancelledOutput, Claim, Commit, ConversationKey, DeleteOutcome,
    EventBatch, FencingToken, Finalization, Health, History, HistoryLimits, IdempotencyToken, Item,
    ItemOutcome, ItemsOutcome, LockOutcome, LoggedEvents, NewConversation, NewRecord, Notice,
    NoticeCursor, Orphan, Owner, OwnershipLoss, Page, PutOutcome, Record, Report, ResponseKey,
    ResponseStore, StoreFuture, Takeover, WriteOutcome,
};
use crate::ids::ResponseId;

impl ResponseStore for Redis {
    fn admit(&self) -> StoreFuture<'_, ()> {
        self.meter(Op::Admit, move || self.admit_now())
    }

    fn create(&self, key: ResponseKey, record: NewRecord) -> StoreFuture<'_, ()> {
        self.meter(Op::Create, move || async move {
            let _ = self.create_record(key, record, None).await?;
            Ok(())
        })
    }

    fn create_in_conversation(
        &self,
        key: ResponseKey,
        record: NewRecord,
        commit: Commit,
    ) -> StoreFuture<'_, PutOutcome> {
        self.meter(Op::CreateInConversation, move || {
            self.create_record(key, record, Some(commit))
        })
    }

    fn get(&self, key: ResponseKey) -> StoreFuture<'_, Option<Record>> {
        self.meter(Op::Get, move || self.get_record(key))
    }

    fn input(&self, key: ResponseKey) -> StoreFuture<'_, Option<Bytes>> {
        self.meter(Op::Input, move || self.get_input(key))
    }

    fn request(&self, key: ResponseKey) -> StoreFuture<'_, Option<Bytes>> {
        self.meter(Op::Request, move || self.get_request(key))
    }

    fn history(&self, key: ResponseKey, max: HistoryLimits) -> StoreFuture<'_, History> {
        self.meter(Op::History, move || self.get_history(key, max))
    }

    fn keep_chain(&self, key: ResponseKey) -> StoreFuture<'_, Option<ResponseId>> {
        self.meter(Op::KeepChain, move || self.keep_chain_of(key))
    }

    fn delete(&self, key: ResponseKey) -> StoreFuture<'_, DeleteOutcome> {
        self.meter(Op::Delete, move || self.delete_record(key))
    }

    fn start(&self, key: ResponseKey, fence: FencingToken) -> StoreFuture<'_, WriteOutcome> {
        self.meter(Op::Start, move || self.start_record(key, fence))
    }

    fn append(
        &self,
        key: ResponseKey,
        fence: FencingToken,
        batch: EventBatch,
    ) -> StoreFuture<'_, WriteOutcome> {
        self.meter(Op::Append, move || self.append_events(key, fence, batch))
    }

    fn finalize(
        &self,
        key: ResponseKey,
        fence: FencingToken,
        end: Finalization,
    ) -> StoreFuture<'_, WriteOutcome> {
        self.meter(Op::Finalize, move || self.finalize_record(key, fence, end))
    }

    fn cancel(&self, key: ResponseKey, cancel: Cancellation) -> StoreFuture<'_, CancelOutcome> {
        self.meter(Op::Cancel, move || self.cancel_record(key, cancel))
    }

    fn finalize_cancelled(
        &self,
        key: ResponseKey,
        fence: FencingToken,
        output: CancelledOutput,
    ) -> StoreFuture<'_, WriteOutcome> {
        self.meter(Op::FinalizeCancelled, move || {
            self.finalize_cancelled_record(key, fence, output)
        })
    }

    fn events(
        &self,
        key: ResponseKey,
        after: Option<u64>,
        bytes_max: u64,
    ) -> StoreFuture<'_, Option<LoggedEvents>> {
        self.meter(Op::Events, move || {
            self.read_events(key, after, bytes_max, false)
        })
    }

    fn events_with_tokens(
        &self,
        key: ResponseKey,
        after: Option<u64>,
        bytes_max: u64,
    ) -> StoreFuture<'_, Option<LoggedEvents>> {
        self.meter(Op::Events, move || {
            self.read_events(key, after, bytes_max, true)
        })
    }

    fn heartbeat(&self, owner: Owner, name: &str, lease: Duration) -> StoreFuture<'_, ()> {
        let name = name.to_owned();
        self.meter(Op::Heartbeat, move || self.renew_lease(owner, name, lease))
    }

    fn end_lease(&self, owner: Owner) -> StoreFuture<'_, ()> {
        self.meter(Op::EndLease, move || self.drop_lease(owner))
    }

    fn check_ownership(
        &self,
        running: Vec<(ResponseKey, FencingToken)>,
    ) -> StoreFuture<'_, Vec<(ResponseKey, OwnershipLoss)>> {
        self.meter(Op::CheckOwnership, move || self.lost_ownerships(running))
    }

    fn orphans(&self, max: usize) -> StoreFuture<'_, Vec<Orphan>> {
        self.meter(Op::Orphans, move || self.find_orphans(max))
    }

    fn untracked(
        &self,
        owner: Owner,
        running: Vec<ResponseKey>,
        max: usize,
    ) -> StoreFuture<'_, Vec<(ResponseKey, FencingToken)>> {
        self.meter(Op::Untracked, move || {
            self.find_untracked(owner, running, max)
        })
    }

    fn take_over(&self, orphan: Orphan, by: Owner) -> StoreFuture<'_, Takeover> {
        self.meter(Op::TakeOver, move || self.take_over_orphan(orphan, by))
    }

    fn release(&self, key: ResponseKey, fence: FencingToken) -> StoreFuture<'_, WriteOutcome> {
        self.meter(Op::Release, move || self.release_record(key, fence))
    }

    fn notices(
        &self,
        owner: Owner,
        after: NoticeCursor,
    ) -> StoreFuture<'_, (Vec<Notice>, NoticeCursor)> {
        self.meter(Op::Notices, move || self.read_notices(owner, after))
    }

    fn create_conversation(
        &self,
        key: ConversationKey,
        new: NewConversation,
    ) -> StoreFuture<'_, ()> {
        self.meter(Op::CreateConversation, move || {
            self.make_conversation(key, new)
        })
    }

    fn conversation(&self, key: ConversationKey) -> StoreFuture<'_, Option<Bytes>> {
        self.meter(Op::Conversation, move || self.get_conversation(key))
    }

    fn update_conversation(&self, key: ConversationKey, object: Bytes) -> StoreFuture<'_, bool> {
        self.meter(Op::UpdateConversation, move || {
            self.update_object(key, object)
        })
    }

    fn delete_conversation(&self, key: ConversationKey) -> StoreFuture<'_, bool> {
        self.meter(Op::DeleteConversation, move || self.drop_conversation(key))
    }

    fn add_items(
        &self,
        key: ConversationKey,
        token: IdempotencyToken,
        items: Vec<Item>,
    ) -> StoreFuture<'_, PutOutcome> {
        self.meter(Op::AddItems, move || {
            self.put_items(key, PutKind::Add, token, items, Bytes::new())
        })
    }

    fn items(&self, key: ConversationKey, page: Page) -> StoreFuture<'_, ItemsOutcome> {
        self.meter(Op::Items, move || self.page_of_items(key, page))
    }

    fn all_items(&self, key: ConversationKey, bytes_max: u64) -> StoreFuture<'_, ItemsOutcome> {
        self.meter(Op::AllItems, move || self.every_item(key, bytes_max))
    }

    fn item(&self, key: ConversationKey, item: &str) -> StoreFuture<'_, ItemOutcome> {
        let item = item.to_owned();
        self.meter(Op::Item, move || self.one_item(key, item))
    }

    fn delete_item(&self, key: ConversationKey, item: &str) -> StoreFuture<'_, ItemOutcome> {
        let item = item.to_owned();
        self.meter(Op::DeleteItem, move || self.drop_item(key, item))
    }

    fn lock(&self, key: ConversationKey, claim: Claim) -> StoreFuture<'_, LockOutcome> {
        self.meter(Op::Lock, move || self.take_lock(key, "lock", claim))
    }

    fn renew_lock(&self, key: ConversationKey, claim: Claim) -> StoreFuture<'_, LockOutcome> {
        self.meter(Op::RenewLock, move || self.take_lock(key, "renew", claim))
    }

    fn commit(
        &self,
        key: ConversationKey,
        token: IdempotencyToken,
        items: Vec<Item>,
    ) -> StoreFuture<'_, PutOutcome> {
        self.meter(Op::Commit, move || {
            self.put_items(key, PutKind::Commit, token, items, Bytes::new())
        })
    }

    fn unlock(&self, key: ConversationKey, token: IdempotencyToken) -> StoreFuture<'_, ()> {
        self.meter(Op::Unlock, move || self.drop_lock(key, token))
    }

    fn health(&self) -> Health {
        self.current_health()
    }

    fn report(&self) -> StoreFuture<'_, Report> {
        self.meter(Op::Report, move || self.report_now())
    }
}
