//! One conversation in the memory store.

use std::collections::{HashSet, VecDeque};
use std::mem::size_of;
use std::time::Instant;

use bytes::Bytes;

use super::capacity::Cost;
use crate::store::conversation::{Order, TOKENS_MAX};
use crate::store::{
    Claim, Error, IdempotencyToken, Item, ItemOutcome, ItemsOutcome, LockOutcome, NewConversation,
    Page, PutOutcome,
};

/// Overhead of a conversation: map node, table entry, allocator.
const OVERHEAD_BYTES: usize = size_of::<Conversation>() + 56 + 36 + 64;
const ITEM_BYTES: usize = 2 * size_of::<Item>() + 48;

#[derive(Debug)]
pub(super) struct Conversation {
    pub(super) created_with: IdempotencyToken,
    pub(super) used: u64,
    pub(super) expires: Option<Instant>,
    object: Bytes,
    /// Oldest first.
    items: Vec<Item>,
    item_bytes: u64,
    /// Tokens of the last additions, oldest first.
    added_by: VecDeque<IdempotencyToken>,
    committed_by: VecDeque<IdempotencyToken>,
    lock: Option<(IdempotencyToken, Instant)>,
}

pub(super) fn size(items: &[Item]) -> usize {
    items
        .iter()
        .map(|item| item.id.len() + item.json.len())
        .sum()
}

fn remember(tokens: &mut VecDeque<IdempotencyToken>, token: IdempotencyToken) {
    if tokens.len() == TOKENS_MAX {
        tokens.pop_front();
    }
    tokens.push_back(token);
}

impl Conversation {
    pub(super) fn new(new: NewConversation) -> Result<Self, Error> {
        let mut conversation = Self {
            created_with: new.token,
            used: 0,
            expires: None,
            object: Bytes::copy_from_slice(&new.object),
            items: Vec::new(),
            item_bytes: 0,
            added_by: VecDeque::new(),
            committed_by: VecDeque::new(),
            lock: None,
        };
        match conversation.put(new.items, u64::MAX)? {
            PutOutcome::Done => Ok(conversation),
            PutOutcome::Gone | PutOutcome::Taken(_) | PutOutcome::Unlocked => Err(Error::Exists),
        }
    }

    pub(super) fn cost(&self) -> Cost {
        let items = self.items.capacity() * ITEM_BYTES;
        let tokens = (self.added_by.capacity() + self.committed_by.capacity())
            * size_of::<IdempotencyToken>();
        Cost {
            bytes: (OVERHEAD_BYTES + self.object.len() + items + tokens) as u64 + self.item_bytes,
            runs: false,
        }
    }

    pub(super) fn object(&mut self) -> Bytes {
        self.object.clone()
    }

    pub(super) fn update(&mut self, object: &Bytes) {
        self.object = Bytes::copy_from_slice(object);
    }

    fn put(&mut self, items: Vec<Item>, bytes_max: u64) -> Result<PutOutcome, Error> {
        let mut ids: HashSet<&str> = self.items.iter().map(|item| &*item.id).collect();
        if let Some(taken) = items.iter().find(|item| !ids.insert(&item.id)) {
            return Ok(PutOutcome::Taken(taken.id.clone()));
        }
        let bytes = self.item_bytes + size(&items) as u64;
        if bytes > bytes_max {
            return Err(Error::TooLarge {
                bytes,
                max: bytes_max,
            });
        }
        self.item_bytes = bytes;
        self.items.extend(items.into_iter().map(|item| Item {
            json: Bytes::copy_from_slice(&item.json),
            id: item.id,
        }));
        Ok(PutOutcome::Done)
    }

    pub(super) fn add(
        &mut self,
        token: IdempotencyToken,
        items: Vec<Item>,
        bytes_max: u64,
    ) -> Result<PutOutcome, Error> {
        if self.added_by.contains(&token) {
            return Ok(PutOutcome::Done);
        }
        let put = self.put(items, bytes_max)?;
        if put == PutOutcome::Done {
            remember(&mut self.added_by, token);
        }
        Ok(put)
    }

    /// Succeeds after the lease has expired, if no other request took the lock.
    pub(super) fn commit(
        &mut self,
        token: IdempotencyToken,
        items: Vec<Item>,
        bytes_max: u64,
    ) -> Result<PutOutcome, Error> {
        if self.committed_by.contains(&token) {
            return Ok(PutOutcome::Done);
        }
        if self.lock.is_none_or(|(holder, _)| holder != token) {
            return Ok(PutOutcome::Unlocked);
        }
        let put = self.put(items, bytes_max)?;
        if put == PutOutcome::Done {
            remember(&mut self.committed_by, token);
            self.lock = None;
        }
        Ok(put)
    }

    pub(super) fn lock(&mut self, now: Instant, claim: Claim) -> LockOutcome {
        if let Some((holder, until)) = self.lock
            && holder != claim.token
            && now < until
        {
            return LockOutcome::Busy;
        }
        self.lock = Some((claim.token, now + claim.lease));
        LockOutcome::Locked
    }

    /// Succeeds after the lease has expired, if no other request took the lock.
    pub(super) fn renew_lock(&mut self, now: Instant, claim: Claim) -> LockOutcome {
        match self.lock {
            Some((holder, _)) if holder == claim.token => self.lock(now, claim),
            _ => LockOutcome::Lost,
        }
    }

    pub(super) fn is_locked(&self, now: Instant) -> bool {
        self.lock.is_some_and(|(_, until)| now < until)
    }

    pub(super) fn unlock(&mut self, token: IdempotencyToken) {
        self.lock = self.lock.filter(|(holder, _)| *holder != token);
    }

    pub(super) fn page(&mut self, page: &Page) -> ItemsOutcome {
        let ordered: Box<dyn Iterator<Item = &Item>> = match page.order {
            Order::OldestFirst => Box::new(self.items.iter()),
            Order::NewestFirst => Box::new(self.items.iter().rev()),
        };
        let mut ordered = ordered.peekable();
        if let Some(after) = &page.after
            && !ordered.any(|item| item.id == *after)
        {
            return ItemsOutcome::UnknownAfter;
        }
        let items: Vec<Item> = ordered
            .by_ref()
            .take(page.limit as usize)
            .cloned()
            .collect();
        ItemsOutcome::Found {
            items,
            has_more: ordered.next().is_some(),
        }
    }

    pub(super) fn all(&mut self, bytes_max: u64) -> ItemsOutcome {
        if self.item_bytes > bytes_max {
            return ItemsOutcome::TooLarge {
                bytes: self.item_bytes,
            };
        }
        ItemsOutcome::Found {
            items: self.items.clone(),
            has_more: false,
        }
    }

    fn position(&self, id: &str) -> Option<usize> {
        self.items.iter().position(|item| &*item.id == id)
    }

    pub(super) fn item(&mut self, id: &str) -> ItemOutcome {
        match self.position(id) {
            Some(position) => ItemOutcome::Found(self.items[position].json.clone()),
            None => ItemOutcome::NoItem,
        }
    }

    pub(super) fn delete(&mut self, id: &str) -> ItemOutcome {
        let Some(position) = self.position(id) else {
            return ItemOutcome::NoItem;
        };
        let deleted = self.items.remove(position);
        self.item_bytes -= size(&[deleted]) as u64;
        ItemOutcome::Found(self.object.clone())
    }
}
