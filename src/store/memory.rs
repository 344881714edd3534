//! The store in the memory of the process: the default, for one replica.
//!
//! Records are sharded by root, so a chain is read under one lock. Count and size are bounded: finished records
//! are evicted, the least recently used of all shards first. Running ones are never evicted and may use at most
//! half of the capacity. There is no background work: operations drop expired records that they come across. Documents
//! lie in a table of their own, under one lock.

mod capacity;
mod conversation;
mod conversations;
mod document_table;
mod documents;
mod outbox;
mod outbox_queues;
mod owners;
mod response;
mod responses;
mod settings;
mod shard;
mod store;
mod transitions;
mod values;

use std::time::Duration;

use bytes::Bytes;

pub use self::settings::Settings;
pub use self::store::{Clock, Memory};
use super::cancel::NoticeKind;
use super::meters::Op;
use super::record::InitialState;
use super::{
    BackgroundResponses, CancelOutcome, Cancellation, CancelledOutput, Claim, Commit,
    ConversationKey, Conversations, DeleteOutcome, Error, EventBatch, FencingToken, Finalization,
    Health, History, HistoryLimits, IdempotencyToken, Item, ItemOutcome, ItemsOutcome, LockOutcome,
    LoggedEvents, NewConversation, NewRecord, Notice, NoticeCursor, Orphan, Owner, Ownership,
    OwnershipLoss, Page, PutOutcome, Record, Report, ResponseKey, ResponseStore, Responses, Status,
    StoreFuture, Takeover, WriteOutcome,
};

use crate::ids::ResponseId;

/// When clients should retry while running responses fill the store: some of them end within seconds.
const FULL_RETRY: Duration = Duration::from_secs(2);

impl ResponseStore for Memory {
    fn admit(&self) -> StoreFuture<'_, ()> {
        self.operation(Op::Admit, |_| {
            if self.capacity.is_full_of_running(0) {
                return Err(Error::Full {
                    retry_after: FULL_RETRY,
                });
            }
            Ok(())
        })
    }

    fn health(&self) -> Health {
        Health {
            is_up: true,
            reason: String::new(),
            warning: String::new(),
        }
    }

    fn report(&self) -> StoreFuture<'_, Report> {
        self.operation(Op::Report, |now| {
            Ok(Report {
                kind: "memory",
                health: self.health(),
                details: self.details(now),
            })
        })
    }
}

impl Responses for Memory {
    fn create(&self, key: ResponseKey, record: NewRecord) -> StoreFuture<'_, ()> {
        self.in_shard(Op::Create, key.id.root(), move |shard, now| {
            self.keep.check_size(record.size())?;
            if shard.is_created(now, key, record.token)? {
                return Ok(());
            }
            let runs = matches!(record.initial, InitialState::Background { .. });
            if runs && self.capacity.is_full_of_running(record.size() as u64) {
                return Err(Error::Full {
                    retry_after: FULL_RETRY,
                });
            }
            shard.create(now, key, record)
        })
    }

    fn create_in_conversation(
        &self,
        key: ResponseKey,
        record: NewRecord,
        commit: Commit,
    ) -> StoreFuture<'_, PutOutcome> {
        let root = key.id.root();
        self.in_shard(Op::CreateInConversation, root, move |shard, now| {
            self.keep.check_size(record.size())?;
            if shard.is_created(now, key, record.token)? {
                return Ok(PutOutcome::Done);
            }
            let put = shard.commit(now, commit, self.keep.max_record)?;
            if put == PutOutcome::Done {
                shard.create(now, key, record)?;
            }
            Ok(put)
        })
    }

    fn get(&self, key: ResponseKey) -> StoreFuture<'_, Option<Record>> {
        self.in_shard(Op::Get, key.id.root(), move |shard, now| {
            let found = shard.touch(now, key);
            Ok(found.map(|found| found.record(key.id.root())))
        })
    }

    fn input(&self, key: ResponseKey) -> StoreFuture<'_, Option<Bytes>> {
        self.in_shard(Op::Input, key.id.root(), move |shard, now| {
            let found = shard.touch(now, key);
            let found = found.filter(|found| !found.is_ephemeral());
            Ok(found.map(|found| found.values.input()))
        })
    }

    fn request(&self, key: ResponseKey) -> StoreFuture<'_, Option<Bytes>> {
        self.in_shard(Op::Request, key.id.root(), move |shard, now| {
            Ok(shard.find(now, key).and_then(|found| found.request()))
        })
    }

    fn history(&self, key: ResponseKey, max: HistoryLimits) -> StoreFuture<'_, History> {
        self.in_shard(Op::History, key.id.root(), move |shard, now| {
            Ok(shard.history(now, key, max))
        })
    }

    fn keep_chain(&self, key: ResponseKey) -> StoreFuture<'_, Option<ResponseId>> {
        self.in_shard(Op::KeepChain, key.id.root(), move |shard, now| {
            Ok(shard.keep_chain(now, key))
        })
    }

    fn delete(&self, key: ResponseKey) -> StoreFuture<'_, DeleteOutcome> {
        self.in_shard(Op::Delete, key.id.root(), move |shard, now| {
            let deleted = shard.delete(now, key);
            if let DeleteOutcome::Done { owner, .. } = deleted {
                self.notify(owner, key, NoticeKind::Deleted);
            }
            Ok(deleted)
        })
    }
}

impl BackgroundResponses for Memory {
    fn start(&self, key: ResponseKey, fence: FencingToken) -> StoreFuture<'_, WriteOutcome> {
        self.in_shard(Op::Start, key.id.root(), move |shard, now| {
            let started = shard.change(now, key, |found| found.start(fence));
            Ok(started.unwrap_or(WriteOutcome::Gone))
        })
    }

    fn append(
        &self,
        key: ResponseKey,
        fence: FencingToken,
        batch: EventBatch,
    ) -> StoreFuture<'_, WriteOutcome> {
        self.in_shard(Op::Append, key.id.root(), move |shard, now| {
            Ok(shard.append(now, key, fence, &batch))
        })
    }

    fn finalize(
        &self,
        key: ResponseKey,
        fence: FencingToken,
        end: Finalization,
    ) -> StoreFuture<'_, WriteOutcome> {
        self.in_shard(Op::Finalize, key.id.root(), move |shard, now| {
            self.keep
                .check_size(end.content.size() + end.delta_table.len())?;
            let status = end.status;
            let runs = shard.is_running(now, key);
            let outcome = shard.finalize(now, key, fence, end)?;
            if runs && outcome == WriteOutcome::Done {
                self.outbox.on_end(now, key, status);
            }
            Ok(outcome)
        })
    }

    fn cancel(&self, key: ResponseKey, cancel: Cancellation) -> StoreFuture<'_, CancelOutcome> {
        self.in_shard(Op::Cancel, key.id.root(), move |shard, now| {
            let runs = shard.is_running(now, key);
            let cancelled = shard.cancel(now, key, cancel);
            if let CancelOutcome::Done { owner, .. } = cancelled {
                if runs {
                    self.outbox.on_end(now, key, Status::Cancelled);
                }
                self.notify(owner, key, NoticeKind::Cancelled);
            }
            Ok(cancelled)
        })
    }

    fn finalize_cancelled(
        &self,
        key: ResponseKey,
        fence: FencingToken,
        output: CancelledOutput,
    ) -> StoreFuture<'_, WriteOutcome> {
        self.in_shard(Op::FinalizeCancelled, key.id.root(), move |shard, now| {
            self.keep
                .check_size(output.content.size() + output.delta_table.len())?;
            Ok(shard.finalize_cancelled(now, key, fence, output))
        })
    }

    fn events(
        &self,
        key: ResponseKey,
        after: Option<u64>,
        bytes_max: u64,
    ) -> StoreFuture<'_, Option<LoggedEvents>> {
        self.in_shard(Op::Events, key.id.root(), move |shard, now| {
            let found = shard.touch(now, key);
            let read = found.and_then(|found| found.events(now, after, bytes_max));
            Ok(read.map(LoggedEvents::without_tokens))
        })
    }

    fn events_with_tokens(
        &self,
        key: ResponseKey,
        after: Option<u64>,
        bytes_max: u64,
    ) -> StoreFuture<'_, Option<LoggedEvents>> {
        self.in_shard(Op::Events, key.id.root(), move |shard, now| {
            let found = shard.touch(now, key);
            Ok(found.and_then(|found| found.events(now, after, bytes_max)))
        })
    }
}

impl Ownership for Memory {
    fn heartbeat(&self, owner: Owner, name: &str, lease: Duration) -> StoreFuture<'_, ()> {
        let name = name.to_owned();
        self.operation(Op::Heartbeat, move |now| {
            self.owners.lock().heartbeat(now, owner, name, lease);
            Ok(())
        })
    }

    fn end_lease(&self, owner: Owner) -> StoreFuture<'_, ()> {
        self.operation(Op::EndLease, move |_| {
            self.owners.lock().end_lease(owner);
            Ok(())
        })
    }

    fn check_ownership(
        &self,
        running: Vec<(ResponseKey, FencingToken)>,
    ) -> StoreFuture<'_, Vec<(ResponseKey, OwnershipLoss)>> {
        self.operation(Op::CheckOwnership, move |now| {
            let loss = |(key, fence): (ResponseKey, FencingToken)| {
                let mut shard = self.shard(key.id.root()).lock();
                Some((key, shard.ownership_loss(now, key, fence)?))
            };
            Ok(running.into_iter().filter_map(loss).collect())
        })
    }

    fn orphans(&self, max: usize) -> StoreFuture<'_, Vec<Orphan>> {
        self.operation(Op::Orphans, move |now| {
            let alive = self.owners.lock().alive(now);
            let mut orphans = Vec::new();
            for shard in &self.shards {
                orphans.extend(shard.lock().orphans(&alive));
            }
            // A random choice: orphans that a replica cannot take, as those of a tenant at its limit, hide no others.
            Ok(fastrand::choose_multiple(orphans, max))
        })
    }

    fn untracked(
        &self,
        owner: Owner,
        running: Vec<ResponseKey>,
        max: usize,
    ) -> StoreFuture<'_, Vec<(ResponseKey, FencingToken)>> {
        self.operation(Op::Untracked, move |_| {
            let mut untracked = Vec::new();
            for shard in &self.shards {
                let left = max - untracked.len();
                untracked.extend(shard.lock().untracked(owner, &running, left));
                if untracked.len() == max {
                    break;
                }
            }
            Ok(untracked)
        })
    }

    fn take_over(&self, orphan: Orphan, by: Owner) -> StoreFuture<'_, Takeover> {
        self.in_shard(Op::TakeOver, orphan.key.id.root(), move |shard, now| {
            let is_alive = orphan
                .owner
                .is_some_and(|owner| self.owners.lock().is_alive(now, owner));
            let taken_over = shard.change(now, orphan.key, |found| {
                found.take_over(orphan, by, is_alive)
            });
            Ok(taken_over.unwrap_or(Takeover::Gone))
        })
    }

    fn release(&self, key: ResponseKey, fence: FencingToken) -> StoreFuture<'_, WriteOutcome> {
        self.in_shard(Op::Release, key.id.root(), move |shard, now| {
            let released = shard.change(now, key, |found| found.release(fence));
            Ok(released.unwrap_or(WriteOutcome::Gone))
        })
    }

    fn notices(
        &self,
        owner: Owner,
        after: NoticeCursor,
    ) -> StoreFuture<'_, (Vec<Notice>, NoticeCursor)> {
        self.operation(Op::Notices, move |_| {
            Ok(self.owners.lock().notices(owner, after))
        })
    }
}

impl Conversations for Memory {
    fn create_conversation(
        &self,
        key: ConversationKey,
        new: NewConversation,
    ) -> StoreFuture<'_, ()> {
        self.in_shard(Op::CreateConversation, key.id.root(), move |shard, now| {
            self.keep
                .check_size(conversation::size(&new.items) + new.object.len())?;
            shard.create_conversation(now, key, new)
        })
    }

    fn conversation(&self, key: ConversationKey) -> StoreFuture<'_, Option<Bytes>> {
        self.in_shard(Op::Conversation, key.id.root(), move |shard, now| {
            Ok(shard.conversation(now, key, |found| found.object()))
        })
    }

    fn update_conversation(&self, key: ConversationKey, object: Bytes) -> StoreFuture<'_, bool> {
        self.in_shard(Op::UpdateConversation, key.id.root(), move |shard, now| {
            self.keep.check_size(object.len())?;
            let updated = shard.change_conversation(now, key, |found| found.update(&object));
            Ok(updated.is_some())
        })
    }

    fn delete_conversation(&self, key: ConversationKey) -> StoreFuture<'_, bool> {
        self.in_shard(Op::DeleteConversation, key.id.root(), move |shard, now| {
            Ok(shard.delete_conversation(now, key))
        })
    }

    fn add_items(
        &self,
        key: ConversationKey,
        token: IdempotencyToken,
        items: Vec<Item>,
    ) -> StoreFuture<'_, PutOutcome> {
        self.in_shard(Op::AddItems, key.id.root(), move |shard, now| {
            let max = self.keep.max_record;
            shard
                .change_conversation(now, key, |found| found.add(token, items, max))
                .unwrap_or(Ok(PutOutcome::Gone))
        })
    }

    fn items(&self, key: ConversationKey, page: Page) -> StoreFuture<'_, ItemsOutcome> {
        self.in_shard(Op::Items, key.id.root(), move |shard, now| {
            let items = shard.conversation(now, key, |found| found.page(&page));
            Ok(items.unwrap_or(ItemsOutcome::Gone))
        })
    }

    fn all_items(&self, key: ConversationKey, bytes_max: u64) -> StoreFuture<'_, ItemsOutcome> {
        self.in_shard(Op::AllItems, key.id.root(), move |shard, now| {
            let items = shard.conversation(now, key, |found| found.all(bytes_max));
            Ok(items.unwrap_or(ItemsOutcome::Gone))
        })
    }

    fn item(&self, key: ConversationKey, item: &str) -> StoreFuture<'_, ItemOutcome> {
        let item = item.to_owned();
        self.in_shard(Op::Item, key.id.root(), move |shard, now| {
            let found = shard.conversation(now, key, |found| found.item(&item));
            Ok(found.unwrap_or(ItemOutcome::Gone))
        })
    }

    fn delete_item(&self, key: ConversationKey, item: &str) -> StoreFuture<'_, ItemOutcome> {
        let item = item.to_owned();
        self.in_shard(Op::DeleteItem, key.id.root(), move |shard, now| {
            let deleted = shard.change_conversation(now, key, |found| found.delete(&item));
            Ok(deleted.unwrap_or(ItemOutcome::Gone))
        })
    }

    fn lock(&self, key: ConversationKey, claim: Claim) -> StoreFuture<'_, LockOutcome> {
        self.in_shard(Op::Lock, key.id.root(), move |shard, now| {
            let locked = shard.conversation(now, key, |found| found.lock(now, claim));
            Ok(locked.unwrap_or(LockOutcome::Gone))
        })
    }

    fn renew_lock(&self, key: ConversationKey, claim: Claim) -> StoreFuture<'_, LockOutcome> {
        self.in_shard(Op::RenewLock, key.id.root(), move |shard, now| {
            let renewed = shard.conversation(now, key, |found| found.renew_lock(now, claim));
            Ok(renewed.unwrap_or(LockOutcome::Gone))
        })
    }

    fn commit(&self, commit: Commit) -> StoreFuture<'_, PutOutcome> {
        let root = commit.conversation.id.root();
        self.in_shard(Op::Commit, root, move |shard, now| {
            shard.commit(now, commit, self.keep.max_record)
        })
    }

    fn unlock(&self, key: ConversationKey, token: IdempotencyToken) -> StoreFuture<'_, ()> {
        self.in_shard(Op::Unlock, key.id.root(), move |shard, now| {
            let _ = shard.conversation(now, key, |found| found.unlock(token));
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests;
