//! The responses and conversations of some roots: running ones, and the others in order of use.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hashlink::LinkedHashMap;
use rustc_hash::FxBuildHasher;

use super::conversation::Conversation;
use super::entry::Response;
use super::room::Room;
use crate::store::record::CancelledOutput;
use crate::store::settings::Keep;
use crate::store::{
    CancelOutcome, Cancellation, Chain, ConversationKey, DeleteOutcome, Error, EventBatch,
    FencingToken, Finalization, History, HistoryLimits, IdempotencyToken, LoggedEvents,
    NewConversation, NewRecord, Orphan, Owner, OwnershipLoss, Record, ResponseKey, Takeover, Turn,
    Turns, WriteOutcome,
};

/// Expired things looked at in one call, so that none takes long.
const SWEEP_MAX: usize = 4;

#[derive(Debug)]
pub(super) struct Shard {
    place: usize,
    running: HashMap<ResponseKey, Response, FxBuildHasher>,
    /// The longest unused first.
    finished: LinkedHashMap<ResponseKey, Response, FxBuildHasher>,
    conversations: LinkedHashMap<ConversationKey, Conversation, FxBuildHasher>,
    /// Ended background responses, in order of their end: when the events of each go.
    logs: VecDeque<(Instant, ResponseKey)>,
    /// When each of those that are for polling only goes.
    ephemeral: VecDeque<(Instant, ResponseKey)>,
    keep: Keep,
    room: Arc<Room>,
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
    pub(super) fn new(place: usize, keep: Keep, room: Arc<Room>) -> Self {
        Self {
            place,
            running: HashMap::default(),
            finished: LinkedHashMap::default(),
            conversations: LinkedHashMap::default(),
            logs: VecDeque::new(),
            ephemeral: VecDeque::new(),
            keep,
            room,
        }
    }

    /// Drops what has expired, a little at a time.
    pub(super) fn sweep(&mut self, now: Instant) {
        for _ in 0..SWEEP_MAX {
            match self.logs.front() {
                Some((at, key)) if *at <= now => {
                    let key = *key;
                    self.logs.pop_front();
                    self.change(now, key, |response| {
                        // An id may have been deleted and be another response's now.
                        if response.log_until().is_some_and(|until| until <= now) {
                            response.forget_log();
                        }
                    });
                }
                _ => break,
            }
        }
        for _ in 0..SWEEP_MAX {
            match self.ephemeral.front() {
                Some((at, key)) if *at <= now => {
                    let key = *key;
                    self.ephemeral.pop_front();
                    self.find(now, key);
                }
                _ => break,
            }
        }
        for _ in 0..SWEEP_MAX {
            match self.finished.front() {
                Some((key, response)) if response.expires.is_some_and(|at| at <= now) => {
                    let key = *key;
                    self.find(now, key);
                }
                _ => break,
            }
        }
    }

    /// The response, if it is there and has not expired. Counts as no use.
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

    /// As [`Shard::find`], and it counts as the last to go from now on.
    fn touch(&mut self, now: Instant, key: ResponseKey) -> Option<&mut Response> {
        self.find(now, key)?;
        let tick = self.room.tick();
        if self.finished.to_back(&key).is_some() {
            self.finished.get_mut(&key)?.used = tick;
            self.tell_oldest();
        }
        self.find(now, key)
    }

    /// Changes a response and keeps the books: its cost, and the map that it belongs into.
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
        self.room.give_back(before);
        self.room.take(after);
        if ends && let Some(mut response) = self.running.remove(&key) {
            response.used = self.room.tick();
            if let Some(at) = log_until {
                self.logs.push_back((at, key));
            }
            if let Some(at) = response.expires.filter(|_| response.is_for_polling_only()) {
                self.ephemeral.push_back((at, key));
            }
            self.finished.insert(key, response);
            self.tell_oldest();
        }
        Some(result)
    }

    fn drop_finished(&mut self, key: ResponseKey) {
        if let Some(dropped) = self.finished.remove(&key) {
            self.room.give_back(dropped.cost());
            self.tell_oldest();
        }
    }

    /// Tells the room what could go first. A locked conversation is in use.
    fn tell_oldest(&self) {
        let response = self.finished.front().map(|(_, found)| found.used);
        let conversation = self.conversations.front().map(|(_, found)| found.used);
        let oldest = match (response, conversation) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        };
        self.room.set_oldest(self.place, oldest);
    }

    /// Drops what was unused for the longest. False if that is in use: a locked conversation.
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
                    self.room.give_back(dropped.cost());
                }
                dropped.is_some()
            }
            (_, None) => false,
        };
        self.tell_oldest();
        evicted
    }

    /// Whether it was created before by a write with this token; an error if by another.
    pub(super) fn knows(
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
        let ttl = Duration::from_secs(self.keep.record_ttl_s);
        // What it continues is needed for as long as it is.
        for id in record.parent.iter().flat_map(|past| past.ids.iter()) {
            if let Some(found) = self.find(now, ResponseKey { id: *id, ..key })
                && let Some(at) = found.expires
            {
                found.expires = Some(at.max(now + ttl));
            }
        }
        let mut response = Response::new(now, record, &self.keep);
        self.room.take(response.cost());
        if response.status().is_terminal() {
            response.used = self.room.tick();
            self.finished.insert(key, response);
            self.tell_oldest();
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
        (!found.is_for_polling_only()).then(|| found.input())
    }

    pub(super) fn history(
        &mut self,
        now: Instant,
        key: ResponseKey,
        max: HistoryLimits,
    ) -> History {
        let Some(head) = self
            .touch(now, key)
            .filter(|found| !found.is_for_polling_only())
        else {
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
            self.room.give_back(dropped.cost());
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
        // Beyond its half of the room, running work goes on without its events.
        let bytes_max = match self.room.is_full_of_running(batch.bytes.len() as u64) {
            true => 0,
            false => self.keep.log_bytes_max,
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
        amend: CancelledOutput,
    ) -> WriteOutcome {
        let amended = self.change(now, key, |found| found.finalize_cancelled(fence, amend));
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
            let (of, fencing_number) = found.orphan(|it| it != owner)?;
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
        let tick = self.room.tick();
        self.conversations.to_back(&key)?.used = tick;
        self.tell_oldest();
        self.conversations.get_mut(&key)
    }

    fn drop_conversation(&mut self, key: ConversationKey) -> bool {
        let dropped = self.conversations.remove(&key);
        if let Some(dropped) = &dropped {
            self.room.give_back(dropped.cost());
            self.tell_oldest();
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
            return match found.is_made_by(new.token) {
                true => Ok(()),
                false => Err(Error::Exists),
            };
        }
        let mut conversation = Conversation::new(new)?;
        conversation.used = self.room.tick();
        conversation.expires = self.keep.conversation_ttl().map(|ttl| now + ttl);
        self.room.take(conversation.cost());
        self.conversations.insert(key, conversation);
        self.tell_oldest();
        Ok(())
    }

    /// Looks at a conversation, or changes what costs nothing.
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
        let ttl = self.keep.conversation_ttl();
        let found = self.find_conversation(now, key)?;
        let before = found.cost();
        let result = change(found);
        found.expires = ttl.map(|ttl| now + ttl);
        let after = found.cost();
        self.room.give_back(before);
        self.room.take(after);
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

    /// Ids of what is there, for tests.
    #[cfg(test)]
    pub(super) fn ids(&self) -> Vec<crate::ids::ResponseId> {
        let keys = self.running.keys().chain(self.finished.keys());
        keys.map(|key| key.id).collect()
    }
}
