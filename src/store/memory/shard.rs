//! A shard: the responses and conversations of some roots. Finds, expires and evicts them; finished responses and
//! conversations are in order of use.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use hashlink::LinkedHashMap;
use rustc_hash::FxBuildHasher;

use super::capacity::Capacity;
use super::conversation::Conversation;
use super::response::Response;
use crate::store::{ConversationKey, ResponseKey, RetentionSettings};

/// Expired records dropped per call, to bound its duration.
const EXPIRED_MAX: usize = 4;

#[derive(Debug, Default)]
pub(super) struct Shard {
    index: usize,
    pub(super) running: HashMap<ResponseKey, Response, FxBuildHasher>,
    /// Least recently used first.
    pub(super) finished: LinkedHashMap<ResponseKey, Response, FxBuildHasher>,
    /// Cancelled ones whose output is still to be stored.
    pub(super) cancelled: BTreeSet<ResponseKey>,
    pub(super) conversations: LinkedHashMap<ConversationKey, Conversation, FxBuildHasher>,
    /// When the log of each ended background response expires, in order.
    logs: VecDeque<(Instant, ResponseKey)>,
    /// When each ephemeral response expires, in order.
    ephemeral: VecDeque<(Instant, ResponseKey)>,
    pub(super) keep: RetentionSettings,
    pub(super) capacity: Arc<Capacity>,
}

impl Shard {
    pub(super) fn new(index: usize, keep: RetentionSettings, capacity: Arc<Capacity>) -> Self {
        Self {
            index,
            keep,
            capacity,
            ..Self::default()
        }
    }

    /// Drops expired records, a few per call.
    pub(super) fn drop_expired(&mut self, now: Instant) {
        for _ in 0..EXPIRED_MAX {
            let Some((_, key)) = self.logs.pop_front_if(|(at, _)| *at <= now) else {
                break;
            };
            self.change(now, key, |response| {
                // The id may have been deleted and reused.
                if let Some(run) = &mut response.run
                    && run.log_until.is_some_and(|until| until <= now)
                {
                    run.log.forget();
                }
            });
        }
        for _ in 0..EXPIRED_MAX {
            let Some((_, key)) = self.ephemeral.pop_front_if(|(at, _)| *at <= now) else {
                break;
            };
            self.find(now, key);
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
    pub(super) fn find(&mut self, now: Instant, key: ResponseKey) -> Option<&mut Response> {
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
    pub(super) fn touch(&mut self, now: Instant, key: ResponseKey) -> Option<&mut Response> {
        self.find(now, key)?;
        let tick = self.capacity.tick();
        if self.finished.to_back(&key).is_some() {
            self.finished.get_mut(&key)?.used = tick;
            self.publish_oldest();
        }
        self.find(now, key)
    }

    /// Changes a response, accounts for its new size, and moves it to `finished` if it has ended.
    pub(super) fn change<T>(
        &mut self,
        now: Instant,
        key: ResponseKey,
        change: impl FnOnce(&mut Response) -> T,
    ) -> Option<T> {
        let response = self.find(now, key)?;
        let before = response.cost();
        let result = change(response);
        let after = response.cost();
        let ends = before.runs && !after.runs;
        self.capacity.give_back(before);
        self.capacity.take(after);
        if ends && let Some(mut response) = self.running.remove(&key) {
            response.used = self.capacity.tick();
            if let Some(at) = response.run.as_ref().and_then(|run| run.log_until) {
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

    pub(super) fn drop_finished(&mut self, key: ResponseKey) {
        self.cancelled.remove(&key);
        if let Some(dropped) = self.finished.remove(&key) {
            self.capacity.give_back(dropped.cost());
            self.publish_oldest();
        }
    }

    /// Publishes the tick of the least recently used record.
    pub(super) fn publish_oldest(&self) {
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

    /// Returns the conversation unless it has expired, and makes it the most recently used.
    pub(super) fn find_conversation(
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

    pub(super) fn drop_conversation(&mut self, key: ConversationKey) -> bool {
        let dropped = self.conversations.remove(&key);
        if let Some(dropped) = &dropped {
            self.capacity.give_back(dropped.cost());
            self.publish_oldest();
        }
        dropped.is_some()
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
