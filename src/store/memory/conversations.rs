//! The operations on the conversations of a shard.

use std::time::Instant;

use super::conversation::Conversation;
use super::shard::Shard;
use crate::store::{Commit, ConversationKey, Error, NewConversation, PutOutcome};

impl Shard {
    pub(super) fn create_conversation(
        &mut self,
        now: Instant,
        key: ConversationKey,
        new: NewConversation,
    ) -> Result<(), Error> {
        if let Some(found) = self.find_conversation(now, key) {
            return if found.created_with == new.token {
                Ok(())
            } else {
                Err(Error::Exists)
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
        read: impl FnOnce(&mut Conversation) -> T,
    ) -> Option<T> {
        Some(read(self.find_conversation(now, key)?))
    }

    /// Changes a conversation, accounts for its new size, and restarts its retention.
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

    /// Adds the items of a response and unlocks its conversation.
    pub(super) fn commit(
        &mut self,
        now: Instant,
        commit: Commit,
        bytes_max: u64,
    ) -> Result<PutOutcome, Error> {
        let Commit {
            conversation,
            token,
            items,
        } = commit;
        self.change_conversation(now, conversation, |found| {
            found.commit(token, items, bytes_max)
        })
        .unwrap_or(Ok(PutOutcome::Gone))
    }

    pub(super) fn delete_conversation(&mut self, now: Instant, key: ConversationKey) -> bool {
        self.find_conversation(now, key).is_some() && self.drop_conversation(key)
    }
}
