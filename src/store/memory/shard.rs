//! A shard: the responses and conversations of some roots, the finished ones in order of use.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use hashlink::LinkedHashMap;
use rustc_hash::FxBuildHasher;

use super::capacity::Capacity;
use super::conversation::Conversation;
use super::entry::Response;
use crate::store::record::CancelledOutput;
use crate::store::settings::RetentionSettings;
use crate::store::{
    CancelOutcome, Cancellation, Chain, ConversationKey, DeleteOutcome, Error, EventBatch,
    FencingToken, Finalization, History, HistoryLimits, IdempotencyToken, LoggedEvents,
    NewConversation, NewRecord, Orphan, Owner, OwnershipLoss, Record, ResponseKey, Takeover, Turn,
    Turns, WriteOutcome,
};

/// Expired records dropped per call, to bound its duration.
const EXPIRED_MAX: usize = 4;

#[derive(Debug)]
pub(super) struct Shard {
    index: usize,
    running: HashMap<ResponseKey, Response, FxBuildHasher>,
    /// Least recently used first.
    finished: LinkedHashMap<ResponseKey, Response, FxBuildHasher>,
    conversations: LinkedHashMap<ConversationKey, Conversation, FxBuildHasher>,
    /// When the log of each ended background response expires, in order.
    logs: VecDeque<(Instant, ResponseKey)>,
    /// When each ephemeral response expires, in order.
    ephemeral: VecDeque<(Instant, ResponseKey)>,
    keep: RetentionSettings,
    capacity: Arc<Capacity>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) finished: usize,
    pub(super) running: usize,
    pub(super) conversations: usize,
    pub(super) log_bytes: u64,
}

impl Counts {
    pub(super) fn add(&mut self, other: &Self) {
        self.finished += other.finished;
        self.running += other.running;
        self.conversations += other.conversations;
        self.log_bytes += other.log_bytes;
    }
}

impl Shard {
    pub(super) fn new(index: usize, keep: RetentionSettings, capacity: Arc<Capacity>) -> Self {
        Self {
            index,
            running: HashMap::default(),
            finished: LinkedHashMap::default(),
            conversations: LinkedHashMap::default(),
            logs: VecDeque::new(),
            ephemeral: VecDeque::new(),
            keep,
            capacity,
        }
    }

    /// Drops expired records, a few per call.
    pub(super) fn drop_expired(&mut self, now: Instant) {
        for _ in 0..EXPIRED_MAX {
            match self.logs.front() {
                Some((at, key)) if *at <= now => {
                    let key = *key;
                    self.logs.pop_front();
                    self.change(now, key, |response| {
                        // The id may have been deleted and reused.
                        if response.log_until().is_some_and(|until| until <= now) {
                            response.drop_log();
                        }
                    });
                }
                _ => break,
            }
        }
        for _ in 0..EXPIRED_MAX {
            match self.ephemeral.front() {
                Some((at, key)) if *at <= now => {
                    let key = *key;
                    self.ephemeral.pop_front();
                    self.find(now, key);
                }
                _ => break,
            }
        }
        for _ in 0..EXPIRED_MAX {
            match self.finished.front() {
                Some((key, response)) if response.expires.is_some_and(|at| at <= now) => {
                    let key = *key;
                    self.find(now, key);
                }
                _ => break,
            }
        }
    }

    /// Returns the response unless it has expired, without counting as a use.
    fn find(&mut self, now: Instant, key: ResponseKey) -> Option<&mut Response> {
        let has_expired = self
            .finished
            .get(&key)
            .is_some_and(|found| found.expires.is_some_and(|at| at <= now));
        if has_expired {
            self.drop_finished(key);
        }
        if self.running.contains_key(&key) {
            return self.running.get_mut(&key);
        }
        self.finished.get_mut(&key)
    }

    /// As [`Shard::find`], and makes it the most recently used.
    fn touch(&mut self, now: Instant, key: ResponseKey) -> Option<&mut Response> {
        self.find(now, key)?;
        let tick = self.capacity.tick();
        if self.finished.to_back(&key).is_some() {
            self.finished.get_mut(&key)?.used = tick;
            self.publish_oldest();
        }
        self.find(now, key)
    }

    /// Changes a response, accounts for its new size, and moves it to `finished` if it has ended.
    fn change<T>(
        &mut self,
        now: Instant,
        key: ResponseKey,
        change: impl FnOnce(&mut Response) -> T,
    ) -> Option<T> {
        let response = self.find(now, key)?;
        let before = response.cost();
        let result = change(response);
        let after = response.cost();
        let (ends, log_until) = (before.runs && !after.runs, response.log_until());
        self.capacity.give_back(before);
        self.capacity.take(after);
        if ends && let Some(mut response) = self.running.remove(&key) {
            response.used = self.capacity.tick();
            if let Some(at) = log_until {
                self.logs.push_back((at, key));
            }
            if let Some(at) = response.expires.filter(|_| response.is_ephemeral()) {
                self.ephemeral.push_back((at, key));
            }
            self.finished.insert(key, response);
            self.publish_oldest();
        }
        Some(result)
    }

    fn drop_finished(&mut self, key: ResponseKey) {
        if let Some(dropped) = self.finished.remove(&key) {
            self.capacity.give_back(dropped.cost());
            self.publish_oldest();
        }
    }

    /// Publishes the tick of the least recently used record.
    fn publish_oldest(&self) {
        let response = self.finished.front().map(|(_, found)| found.used);
        let conversation = self.conversations.front().map(|(_, found)| found.used);
        let oldest = match (response, conversation) {
            (Some(response), Some(conversation)) => Some(response.min(conversation)),
            (response, conversation) => response.or(conversation),
        };
        self.capacity.set_oldest(self.index, oldest);
    }

    /// Evicts the least recently used record. False if that is a locked conversation.
    pub(super) fn evict(&mut self, now: Instant) -> bool {
        let response = self.finished.front().map(|(key, found)| (found.used, *key));
        let conversation = self.conversations.front().map(|(_, found)| found.used);
        let evicted = match (response, conversation) {
            (Some((used, key)), other) if other.is_none_or(|other| used < other) => {
                self.drop_finished(key);
                true
            }
            (_, Some(_)) => {
                if let Some((key, front)) = self.conversations.front()
                    && front.is_locked(now)
                {
                    let key = *key;
                    self.find_conversation(now, key);
                    return false;
                }
                let dropped = self.conversations.pop_front();
                if let Some((_, dropped)) = &dropped {
                    self.capacity.give_back(dropped.cost());
                }
                dropped.is_some()
            }
            (_, None) => false,
        };
        self.publish_oldest();
        evicted
    }

    /// Whether the response was created before with this token; an error if with another.
    pub(super) fn is_created(
        &mut self,
        now: Instant,
        key: ResponseKey,
        token: IdempotencyToken,
    ) -> Result<bool, Error> {
        match self.find(now, key) {
            None => Ok(false),
            Some(found) if found.token() == token => Ok(true),
            Some(_) => Err(Error::Exists),
        }
    }

    pub(super) fn create(&mut self, now: Instant, key: ResponseKey, record: NewRecord) {
        let ttl = self.keep.responses;
        // The chain that it continues must live as long as it does.
        for id in record.parent.iter().flat_map(|past| past.ids.iter()) {
            if let Some(found) = self.find(now, ResponseKey { id: *id, ..key })
                && let Some(at) = found.expires
            {
                found.expires = Some(at.max(now + ttl));
            }
        }
        let mut response = Response::new(now, record, &self.keep);
        self.capacity.take(response.cost());
        if response.status().is_terminal() {
            response.used = self.capacity.tick();
            self.finished.insert(key, response);
            self.publish_oldest();
        } else {
            self.running.insert(key, response);
        }
    }

    pub(super) fn get(&mut self, now: Instant, key: ResponseKey) -> Option<Record> {
        let root = key.id.root();
        Some(self.touch(now, key)?.record(root))
    }

    pub(super) fn input(&mut self, now: Instant, key: ResponseKey) -> Option<Bytes> {
        let found = self.touch(now, key)?;
        (!found.is_ephemeral()).then(|| found.input())
    }

    pub(super) fn history(
        &mut self,
        now: Instant,
        key: ResponseKey,
        max: HistoryLimits,
    ) -> History {
        let Some(head) = self.touch(now, key).filter(|found| !found.is_ephemeral()) else {
            return History::Missing(key.id);
        };
        if !head.status().is_terminal() {
            return History::Running(head.status());
        }
        if !head.status().is_continuable() {
            return History::Ended(head.status());
        }
        let past = head.past();
        let count = 1 + past.map_or(0, |past| past.depth as usize);
        let bytes = head.item_bytes() + past.map_or(0, |past| past.bytes);
        if count > max.turns || bytes > max.bytes {
            return History::TooLarge {
                turns: count,
                bytes,
            };
        }
        let hint = head.hint().clone();
        let (mut turns, mut chain) = (Vec::with_capacity(count), Vec::with_capacity(count));
        let mut next = Some(key.id);
        while let Some(id) = next {
            let Some(found) = self.touch(now, ResponseKey { id, ..key }) else {
                return History::Missing(id);
            };
            turns.push(Turn {
                input: found.input(),
                output: found.output(),
            });
            chain.push(id);
            next = found.past().map(|past| past.previous(id.root()));
        }
        turns.reverse();
        chain.reverse();
        History::Found(Turns {
            turns,
            chain: Chain {
                ids: chain.into(),
                bytes,
            },
            hint,
        })
    }

    pub(super) fn delete(&mut self, now: Instant, key: ResponseKey) -> DeleteOutcome {
        let Some(found) = self.find(now, key) else {
            return DeleteOutcome::Gone;
        };
        let (was, owner) = (found.status(), found.owner());
        if let Some(dropped) = self.running.remove(&key) {
            self.capacity.give_back(dropped.cost());
        }
        self.drop_finished(key);
        DeleteOutcome::Done { was, owner }
    }

    pub(super) fn start(
        &mut self,
        now: Instant,
        key: ResponseKey,
        fence: FencingToken,
    ) -> WriteOutcome {
        let started = self.change(now, key, |found| found.start(fence));
        started.unwrap_or(WriteOutcome::Gone)
    }

    pub(super) fn append(
        &mut self,
        now: Instant,
        key: ResponseKey,
        fence: FencingToken,
        batch: &EventBatch,
    ) -> WriteOutcome {
        // If running responses use their half of the capacity, events are no longer kept.
        let bytes_max = match self.capacity.is_full_of_running(batch.bytes.len() as u64) {
            true => 0,
            false => self.keep.max_event_log,
        };
        let appended = self.change(now, key, |found| found.append(fence, batch, bytes_max));
        appended.unwrap_or(WriteOutcome::Gone)
    }

    pub(super) fn finalize(
        &mut self,
        now: Instant,
        key: ResponseKey,
        fence: FencingToken,
        end: Finalization,
    ) -> WriteOutcome {
        let keep = self.keep.clone();
        let ended = self.change(now, key, |found| found.finalize(now, fence, end, &keep));
        ended.unwrap_or(WriteOutcome::Gone)
    }

    pub(super) fn cancel(
        &mut self,
        now: Instant,
        key: ResponseKey,
        cancel: Cancellation,
    ) -> CancelOutcome {
        let Some(found) = self.find(now, key) else {
            return CancelOutcome::Gone;
        };
        if !found.is_background() {
            return CancelOutcome::NotBackground;
        }
        if let Some((was, owner)) = found.cancelled_by(cancel.token) {
            return CancelOutcome::Done { was, owner };
        }
        let (was, owner) = (found.status(), found.owner());
        if was.is_terminal() {
            return CancelOutcome::Terminal(was);
        }
        let keep = self.keep.clone();
        self.change(now, key, |found| found.cancel(now, cancel, &keep));
        CancelOutcome::Done { was, owner }
    }

    pub(super) fn finalize_cancelled(
        &mut self,
        now: Instant,
        key: ResponseKey,
        fence: FencingToken,
        output: CancelledOutput,
    ) -> WriteOutcome {
        let amended = self.change(now, key, |found| found.finalize_cancelled(fence, output));
        amended.unwrap_or(WriteOutcome::Gone)
    }

    pub(super) fn events(
        &mut self,
        now: Instant,
        key: ResponseKey,
        after: Option<u64>,
        bytes_max: u64,
    ) -> Option<LoggedEvents> {
        self.touch(now, key)?.events(now, after, bytes_max)
    }

    pub(super) fn lost(
        &mut self,
        now: Instant,
        key: ResponseKey,
        fence: FencingToken,
    ) -> Option<OwnershipLoss> {
        match self.find(now, key) {
            None => Some(OwnershipLoss::Gone),
            Some(found) => found.lost(fence),
        }
    }

    pub(super) fn orphans(&self, alive: &HashSet<Owner>, max: usize) -> Vec<Orphan> {
        let orphan = |(key, found): (&ResponseKey, &Response)| {
            let (owner, fencing_number) = found.orphan(|owner| alive.contains(&owner))?;
            Some(Orphan {
                key: *key,
                owner,
                fencing_number,
            })
        };
        self.running.iter().filter_map(orphan).take(max).collect()
    }

    pub(super) fn untracked(
        &self,
        owner: Owner,
        running: &[ResponseKey],
        max: usize,
    ) -> Vec<(ResponseKey, FencingToken)> {
        let own = self.running.iter().filter_map(|(key, found)| {
            let (of, fencing_number) = found.orphan(|other| other != owner)?;
            Some((
                *key,
                FencingToken {
                    owner: of?,
                    number: fencing_number,
                },
            ))
        });
        own.filter(|(key, _)| !running.contains(key))
            .take(max)
            .collect()
    }

    pub(super) fn take_over(
        &mut self,
        now: Instant,
        orphan: Orphan,
        by: Owner,
        is_alive: bool,
    ) -> Takeover {
        let adopted = self.change(now, orphan.key, |found| {
            found.take_over(orphan, by, is_alive)
        });
        adopted.unwrap_or(Takeover::Gone)
    }

    pub(super) fn release(
        &mut self,
        now: Instant,
        key: ResponseKey,
        fence: FencingToken,
    ) -> WriteOutcome {
        let released = self.change(now, key, |found| found.release(fence));
        released.unwrap_or(WriteOutcome::Gone)
    }

    fn find_conversation(
        &mut self,
        now: Instant,
        key: ConversationKey,
    ) -> Option<&mut Conversation> {
        let has_expired = self
            .conversations
            .get(&key)
            .is_some_and(|found| found.expires.is_some_and(|at| at <= now));
        if has_expired {
            self.drop_conversation(key);
        }
        let tick = self.capacity.tick();
        self.conversations.to_back(&key)?.used = tick;
        self.publish_oldest();
        self.conversations.get_mut(&key)
    }

    fn drop_conversation(&mut self, key: ConversationKey) -> bool {
        let dropped = self.conversations.remove(&key);
        if let Some(dropped) = &dropped {
            self.capacity.give_back(dropped.cost());
            self.publish_oldest();
        }
        dropped.is_some()
    }

    pub(super) fn create_conversation(
        &mut self,
        now: Instant,
        key: ConversationKey,
        new: NewConversation,
    ) -> Result<(), Error> {
        if let Some(found) = self.find_conversation(now, key) {
            return match found.was_created_with(new.token) {
                true => Ok(()),
                false => Err(Error::Exists),
            };
        }
        let mut conversation = Conversation::new(new)?;
        conversation.used = self.capacity.tick();
        conversation.expires = self.keep.of_conversations().map(|ttl| now + ttl);
        self.capacity.take(conversation.cost());
        self.conversations.insert(key, conversation);
        self.publish_oldest();
        Ok(())
    }

    /// Reads a conversation, or changes it without changing its size.
    pub(super) fn conversation<T>(
        &mut self,
        now: Instant,
        key: ConversationKey,
        look: impl FnOnce(&mut Conversation) -> T,
    ) -> Option<T> {
        Some(look(self.find_conversation(now, key)?))
    }

    pub(super) fn change_conversation<T>(
        &mut self,
        now: Instant,
        key: ConversationKey,
        change: impl FnOnce(&mut Conversation) -> T,
    ) -> Option<T> {
        let ttl = self.keep.of_conversations();
        let found = self.find_conversation(now, key)?;
        let before = found.cost();
        let result = change(found);
        found.expires = ttl.map(|ttl| now + ttl);
        let after = found.cost();
        self.capacity.give_back(before);
        self.capacity.take(after);
        Some(result)
    }

    pub(super) fn delete_conversation(&mut self, now: Instant, key: ConversationKey) -> bool {
        self.find_conversation(now, key).is_some() && self.drop_conversation(key)
    }

    pub(super) fn counts(&self) -> Counts {
        let logs = self.running.values().map(Response::log_bytes);
        Counts {
            finished: self.finished.len(),
            running: self.running.len(),
            conversations: self.conversations.len(),
            log_bytes: logs.sum(),
        }
    }

    #[cfg(test)]
    pub(super) fn cost(&self) -> u64 {
        let responses = self.running.values().chain(self.finished.values());
        let responses: u64 = responses.map(|found| found.cost().bytes).sum();
        let conversations = self.conversations.values().map(|found| found.cost().bytes);
        responses + conversations.sum::<u64>()
    }

    #[cfg(test)]
    pub(super) fn ids(&self) -> Vec<crate::ids::ResponseId> {
        let keys = self.running.keys().chain(self.finished.keys());
        keys.map(|key| key.id).collect()
    }
}
