//! The store in the memory of the process: the default, for one replica.
//!
//! Records are sharded by root, so a chain is read under one lock. Count and size are bounded: finished records
//! are evicted, the least recently used of all shards first. Running ones are never evicted and may use at most
//! half of the capacity. There is no background work: operations drop expired records that they come across.

mod capacity;
mod conversation;
mod entry;
mod owners;
mod shard;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::cancel::NoticeKind;
use super::meters::{Meters, Op, Outcome};
use super::record::InitialState;
use super::settings::RetentionSettings;
use super::{
    CancelOutcome, Cancellation, CancelledOutput, Claim, ConversationKey, DeleteOutcome, Error,
    EventBatch, FencingToken, Finalization, Health, History, HistoryLimits, IdempotencyToken, Item,
    ItemOutcome, ItemsOutcome, LockOutcome, LoggedEvents, NewConversation, NewRecord, Notice,
    NoticeCursor, Orphan, Owner, OwnershipLoss, Page, PutOutcome, Record, Report, ResponseKey,
    ResponseStore, StoreFuture, Takeover, WriteOutcome,
};
use crate::ids::Root;
use crate::observe;
use crate::observe::metrics::Registry;
use crate::units::SizeText;
use capacity::Capacity;
use owners::Owners;
use shard::Shard;

/// Locks are held for microseconds; with 64 shards a hundred concurrent requests rarely collide.
const SHARDS: usize = 64;
/// Locked conversations that one call skips before it gives up evicting.
const IN_USE_MAX: usize = 128;
/// When clients should retry while running responses fill the store: some of them end within seconds.
const FULL_RETRY: Duration = Duration::from_secs(2);

/// Responses and conversations in the memory of this process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Responses and conversations together. When this or `max_size` is reached, the one that was not used for
    /// the longest time is dropped; running ones never, which get half of the room at most.
    #[schemars(range(min = 2))]
    pub max_records: u64,
    /// Size of all responses and conversations, with about 400 bytes each for keeping them. A turn of a chat has
    /// some 10 KB: 1 GiB keeps the last 100,000.
    #[serde(with = "SizeText")]
    #[schemars(extend("min" = "1MiB"))]
    pub max_size: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_records: 1_000_000,
            max_size: 1 << 30,
        }
    }
}

/// The clock; tests replace it.
pub type Clock = Arc<dyn Fn() -> Instant + Send + Sync>;

pub struct Memory {
    shards: Box<[Mutex<Shard>]>,
    owners: Mutex<Owners>,
    capacity: Arc<Capacity>,
    keep: RetentionSettings,
    meters: Meters,
    clock: Clock,
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").finish_non_exhaustive()
    }
}

impl Memory {
    pub fn new(settings: &Settings, keep: &RetentionSettings, registry: &Registry) -> Self {
        Self::with_clock(settings, keep, registry, Arc::new(observe::now))
    }

    /// Creates a store with the given clock.
    pub fn with_clock(
        settings: &Settings,
        keep: &RetentionSettings,
        registry: &Registry,
        clock: Clock,
    ) -> Self {
        let capacity = Arc::new(Capacity::new(settings, SHARDS));
        let shard = |place| Mutex::new(Shard::new(place, keep.clone(), capacity.clone()));
        Self {
            shards: (0..SHARDS).map(shard).collect(),
            owners: Mutex::new(Owners::default()),
            capacity,
            keep: keep.clone(),
            meters: Meters::new(registry),
            clock,
        }
    }

    fn shard_index(root: Root) -> usize {
        // Roots are random.
        root.0 as usize % SHARDS
    }

    fn ask<'a, T: Outcome + Send + 'a>(
        &'a self,
        op: Op,
        answer: impl FnOnce(Instant) -> Result<T, Error> + Send + 'a,
    ) -> StoreFuture<'a, T> {
        let asked = async move { answer((self.clock)()) };
        Box::pin(self.meters.observe(op, asked))
    }

    /// An operation on one response.
    fn on_response<'a, T: Outcome + Send + 'a>(
        &'a self,
        op: Op,
        key: ResponseKey,
        answer: impl FnOnce(&mut Shard, Instant) -> Result<T, Error> + Send + 'a,
    ) -> StoreFuture<'a, T> {
        self.in_shard(op, Self::shard_index(key.id.root()), answer)
    }

    /// An operation on one conversation.
    fn on_conversation<'a, T: Outcome + Send + 'a>(
        &'a self,
        op: Op,
        key: ConversationKey,
        answer: impl FnOnce(&mut Shard, Instant) -> Result<T, Error> + Send + 'a,
    ) -> StoreFuture<'a, T> {
        self.in_shard(op, Self::shard_index(key.id.root()), answer)
    }

    fn in_shard<'a, T: Outcome + Send + 'a>(
        &'a self,
        op: Op,
        place: usize,
        answer: impl FnOnce(&mut Shard, Instant) -> Result<T, Error> + Send + 'a,
    ) -> StoreFuture<'a, T> {
        self.ask(op, move |now| {
            let result = {
                let mut shard = self.shards[place].lock();
                shard.drop_expired(now);
                answer(&mut shard, now)
            };
            self.make_room(now);
            result
        })
    }

    /// Evicts the least recently used finished records until the rest fits.
    fn make_room(&self, now: Instant) {
        let (mut evicted, mut in_use) = (0, 0);
        while self.capacity.is_over() && in_use < IN_USE_MAX {
            let Some(place) = self.capacity.oldest_shard() else {
                break;
            };
            match self.shards[place].lock().evict(now) {
                true => evicted += 1,
                false => in_use += 1,
            }
        }
        if evicted > 0 {
            self.meters
                .evicted
                .with_label_values(&["capacity"])
                .inc_by(evicted);
        }
        self.meters.bytes.set(self.capacity.bytes() as i64);
        self.meters.records.set(self.capacity.records() as i64);
    }

    fn notify(&self, owner: Option<Owner>, key: ResponseKey, what: NoticeKind) {
        if let Some(owner) = owner {
            let at_ms = observe::unix_ms();
            self.owners.lock().notify(
                owner,
                Notice {
                    key,
                    kind: what,
                    at_ms,
                },
            );
        }
    }

    fn check_size(&self, bytes: usize) -> Result<(), Error> {
        let max = self.keep.max_record;
        match bytes as u64 {
            bytes if bytes > max => Err(Error::TooLarge { bytes, max }),
            _ => Ok(()),
        }
    }
}

impl ResponseStore for Memory {
    fn admit(&self) -> StoreFuture<'_, ()> {
        self.ask(Op::Admit, |_| {
            if self.capacity.is_full_of_running(0) {
                return Err(Error::Full {
                    retry_after: FULL_RETRY,
                });
            }
            Ok(())
        })
    }

    fn create(&self, key: ResponseKey, record: NewRecord) -> StoreFuture<'_, ()> {
        self.on_response(Op::Create, key, move |shard, now| {
            self.check_size(entry::size(&record))?;
            if shard.is_created(now, key, record.token)? {
                return Ok(());
            }
            let runs = matches!(record.initial, InitialState::Background { .. });
            if runs
                && self
                    .capacity
                    .is_full_of_running(entry::size(&record) as u64)
            {
                return Err(Error::Full {
                    retry_after: FULL_RETRY,
                });
            }
            shard.create(now, key, record);
            Ok(())
        })
    }

    fn get(&self, key: ResponseKey) -> StoreFuture<'_, Option<Record>> {
        self.on_response(Op::Get, key, move |shard, now| Ok(shard.get(now, key)))
    }

    fn input(&self, key: ResponseKey) -> StoreFuture<'_, Option<Bytes>> {
        self.on_response(Op::Input, key, move |shard, now| Ok(shard.input(now, key)))
    }

    fn history(&self, key: ResponseKey, max: HistoryLimits) -> StoreFuture<'_, History> {
        self.on_response(Op::History, key, move |shard, now| {
            Ok(shard.history(now, key, max))
        })
    }

    fn delete(&self, key: ResponseKey) -> StoreFuture<'_, DeleteOutcome> {
        self.on_response(Op::Delete, key, move |shard, now| {
            let deleted = shard.delete(now, key);
            if let DeleteOutcome::Done { owner, .. } = deleted {
                self.notify(owner, key, NoticeKind::Deleted);
            }
            Ok(deleted)
        })
    }

    fn start(&self, key: ResponseKey, fence: FencingToken) -> StoreFuture<'_, WriteOutcome> {
        self.on_response(Op::Start, key, move |shard, now| {
            Ok(shard.start(now, key, fence))
        })
    }

    fn append(
        &self,
        key: ResponseKey,
        fence: FencingToken,
        batch: EventBatch,
    ) -> StoreFuture<'_, WriteOutcome> {
        self.on_response(Op::Append, key, move |shard, now| {
            Ok(shard.append(now, key, fence, &batch))
        })
    }

    fn finalize(
        &self,
        key: ResponseKey,
        fence: FencingToken,
        end: Finalization,
    ) -> StoreFuture<'_, WriteOutcome> {
        self.on_response(Op::Finalize, key, move |shard, now| {
            self.check_size(entry::content_size(&end.content) + end.delta_table.len())?;
            Ok(shard.finalize(now, key, fence, end))
        })
    }

    fn cancel(&self, key: ResponseKey, cancel: Cancellation) -> StoreFuture<'_, CancelOutcome> {
        self.on_response(Op::Cancel, key, move |shard, now| {
            let cancelled = shard.cancel(now, key, cancel);
            if let CancelOutcome::Done { owner, .. } = cancelled {
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
        self.on_response(Op::FinalizeCancelled, key, move |shard, now| {
            self.check_size(entry::content_size(&output.content) + output.delta_table.len())?;
            Ok(shard.finalize_cancelled(now, key, fence, output))
        })
    }

    fn events(
        &self,
        key: ResponseKey,
        after: Option<u64>,
        bytes_max: u64,
    ) -> StoreFuture<'_, Option<LoggedEvents>> {
        self.on_response(Op::Events, key, move |shard, now| {
            Ok(shard.events(now, key, after, bytes_max))
        })
    }

    fn heartbeat(&self, owner: Owner, name: &str, lease: Duration) -> StoreFuture<'_, ()> {
        let name = name.to_owned();
        self.ask(Op::Heartbeat, move |now| {
            self.owners.lock().heartbeat(now, owner, name, lease);
            Ok(())
        })
    }

    fn end_lease(&self, owner: Owner) -> StoreFuture<'_, ()> {
        self.ask(Op::EndLease, move |_| {
            self.owners.lock().end_lease(owner);
            Ok(())
        })
    }

    fn check_ownership(
        &self,
        running: Vec<(ResponseKey, FencingToken)>,
    ) -> StoreFuture<'_, Vec<(ResponseKey, OwnershipLoss)>> {
        self.ask(Op::CheckOwnership, move |now| {
            let lost = |(key, fence): (ResponseKey, FencingToken)| {
                let mut shard = self.shards[Self::shard_index(key.id.root())].lock();
                Some((key, shard.lost(now, key, fence)?))
            };
            Ok(running.into_iter().filter_map(lost).collect())
        })
    }

    fn orphans(&self, max: usize) -> StoreFuture<'_, Vec<Orphan>> {
        self.ask(Op::Orphans, move |now| {
            let owners = self.owners.lock().alive(now);
            let mut orphans = Vec::new();
            for shard in &self.shards {
                orphans.extend(shard.lock().orphans(&owners, max - orphans.len()));
                if orphans.len() == max {
                    break;
                }
            }
            Ok(orphans)
        })
    }

    fn untracked(
        &self,
        owner: Owner,
        running: Vec<ResponseKey>,
        max: usize,
    ) -> StoreFuture<'_, Vec<(ResponseKey, FencingToken)>> {
        self.ask(Op::Untracked, move |_| {
            let mut strays = Vec::new();
            for shard in &self.shards {
                let left = max - strays.len();
                strays.extend(shard.lock().untracked(owner, &running, left));
                if strays.len() == max {
                    break;
                }
            }
            Ok(strays)
        })
    }

    fn take_over(&self, orphan: Orphan, by: Owner) -> StoreFuture<'_, Takeover> {
        self.on_response(Op::TakeOver, orphan.key, move |shard, now| {
            let is_alive = orphan
                .owner
                .is_some_and(|owner| self.owners.lock().is_alive(now, owner));
            Ok(shard.take_over(now, orphan, by, is_alive))
        })
    }

    fn release(&self, key: ResponseKey, fence: FencingToken) -> StoreFuture<'_, WriteOutcome> {
        self.on_response(Op::Release, key, move |shard, now| {
            Ok(shard.release(now, key, fence))
        })
    }

    fn notices(
        &self,
        owner: Owner,
        after: NoticeCursor,
    ) -> StoreFuture<'_, (Vec<Notice>, NoticeCursor)> {
        self.ask(Op::Notices, move |_| {
            Ok(self.owners.lock().notices(owner, after))
        })
    }

    fn create_conversation(
        &self,
        key: ConversationKey,
        new: NewConversation,
    ) -> StoreFuture<'_, ()> {
        self.on_conversation(Op::CreateConversation, key, move |shard, now| {
            self.check_size(conversation::size(&new.items) + new.object.len())?;
            shard.create_conversation(now, key, new)
        })
    }

    fn conversation(&self, key: ConversationKey) -> StoreFuture<'_, Option<Bytes>> {
        self.on_conversation(Op::Conversation, key, move |shard, now| {
            Ok(shard.conversation(now, key, |found| found.object()))
        })
    }

    fn update_conversation(&self, key: ConversationKey, object: Bytes) -> StoreFuture<'_, bool> {
        self.on_conversation(Op::UpdateConversation, key, move |shard, now| {
            self.check_size(object.len())?;
            let updated = shard.change_conversation(now, key, |found| found.update(&object));
            Ok(updated.is_some())
        })
    }

    fn delete_conversation(&self, key: ConversationKey) -> StoreFuture<'_, bool> {
        self.on_conversation(Op::DeleteConversation, key, move |shard, now| {
            Ok(shard.delete_conversation(now, key))
        })
    }

    fn add_items(
        &self,
        key: ConversationKey,
        token: IdempotencyToken,
        items: Vec<Item>,
    ) -> StoreFuture<'_, PutOutcome> {
        self.on_conversation(Op::AddItems, key, move |shard, now| {
            let max = self.keep.max_record;
            shard
                .change_conversation(now, key, |found| found.add(token, items, max))
                .unwrap_or(Ok(PutOutcome::Gone))
        })
    }

    fn items(&self, key: ConversationKey, page: Page) -> StoreFuture<'_, ItemsOutcome> {
        self.on_conversation(Op::Items, key, move |shard, now| {
            let items = shard.conversation(now, key, |found| found.page(&page));
            Ok(items.unwrap_or(ItemsOutcome::Gone))
        })
    }

    fn all_items(&self, key: ConversationKey, bytes_max: u64) -> StoreFuture<'_, ItemsOutcome> {
        self.on_conversation(Op::AllItems, key, move |shard, now| {
            let items = shard.conversation(now, key, |found| found.all(bytes_max));
            Ok(items.unwrap_or(ItemsOutcome::Gone))
        })
    }

    fn item(&self, key: ConversationKey, item: &str) -> StoreFuture<'_, ItemOutcome> {
        let item = item.to_owned();
        self.on_conversation(Op::Item, key, move |shard, now| {
            let found = shard.conversation(now, key, |found| found.item(&item));
            Ok(found.unwrap_or(ItemOutcome::Gone))
        })
    }

    fn delete_item(&self, key: ConversationKey, item: &str) -> StoreFuture<'_, ItemOutcome> {
        let item = item.to_owned();
        self.on_conversation(Op::DeleteItem, key, move |shard, now| {
            let deleted = shard.change_conversation(now, key, |found| found.delete(&item));
            Ok(deleted.unwrap_or(ItemOutcome::Gone))
        })
    }

    fn lock(&self, key: ConversationKey, claim: Claim) -> StoreFuture<'_, LockOutcome> {
        self.on_conversation(Op::Lock, key, move |shard, now| {
            let locked = shard.conversation(now, key, |found| found.lock(now, claim));
            Ok(locked.unwrap_or(LockOutcome::Gone))
        })
    }

    fn commit(
        &self,
        key: ConversationKey,
        token: IdempotencyToken,
        items: Vec<Item>,
    ) -> StoreFuture<'_, PutOutcome> {
        self.on_conversation(Op::Commit, key, move |shard, now| {
            let max = self.keep.max_record;
            shard
                .change_conversation(now, key, |found| found.commit(token, items, max))
                .unwrap_or(Ok(PutOutcome::Gone))
        })
    }

    fn unlock(&self, key: ConversationKey, token: IdempotencyToken) -> StoreFuture<'_, ()> {
        self.on_conversation(Op::Unlock, key, move |shard, now| {
            let _ = shard.conversation(now, key, |found| found.unlock(token));
            Ok(())
        })
    }

    fn health(&self) -> Health {
        Health {
            is_up: true,
            reason: String::new(),
        }
    }

    fn report(&self) -> StoreFuture<'_, Report> {
        self.ask(Op::Report, |now| {
            let mut counts = shard::Counts::default();
            for shard in &self.shards {
                counts.add(&shard.lock().counts());
            }
            let alive = self.owners.lock().alive(now);
            let left = |shard: &Mutex<Shard>| shard.lock().orphans(&alive, usize::MAX).len();
            let orphans: usize = self.shards.iter().map(left).sum();
            let owners = self.owners.lock().report(now);
            Ok(Report {
                kind: "memory",
                health: self.health(),
                details: json!({
                    "responses": counts.finished,
                    "running": counts.running,
                    "conversations": counts.conversations,
                    "bytes": self.capacity.bytes(),
                    "bytes_max": self.capacity.bytes_max(),
                    "records_max": self.capacity.records_max(),
                    "log_bytes": counts.log_bytes,
                    "orphans": orphans,
                    "owners": owners,
                }),
            })
        })
    }
}

#[cfg(test)]
mod tests;
