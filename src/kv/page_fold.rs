//! Folds the pages of engines that cache in small pages (SGLang, often one token each) into blocks, so that a prompt of a
//! hundred thousand tokens has some thousands of blocks to look up, not a hundred thousand. Pure.
//!
//! A block is stored while all of its pages are, and has the name of its last page. Pages are leaves first removed, as in
//! a radix tree: a removal that would leave a page without the one before it is not understood, and clears the tree.
//!
//! Pages take ten times the memory of their blocks, and have a bound of their own. Beyond it those that were used least are
//! forgotten, the ends of chains first. Their blocks stay: a block is removed by the name of its last page. Only what continues
//! a forgotten page within its block cannot be placed any more.

mod copied;
mod pages;

use std::cmp::Reverse;

use smallvec::SmallVec;

pub use self::copied::{CopiedPages, PageCopyCursor};
pub use self::pages::PageMove;
use self::pages::{NO_PAGE, PageNumber, Pages};
use super::event::{EngineHash, Event, ExtraKey, Removed, Stored, Tier};
use super::index::MemoryAccount;

/// Tokens of a block, where pages are smaller.
pub const BLOCK_TOKENS: u32 = 16;

/// Pages that are stored at once, before memory is looked at again.
const SLICE: usize = 256;

/// At least this part of the pages is forgotten at once, so that not every store looks for the oldest ones.
const MIN_FORGOTTEN: usize = 32;

/// The pages of one rank's cache, as its engine reported them.
#[derive(Debug)]
pub struct PageFold {
    page_size: u32,
    pages: Pages,
    memory: Option<MemoryAccount>,
    /// Counts stores.
    clock: u32,
    /// Pages that were forgotten, or not taken, for want of memory since the caller took this count.
    forgotten: u64,
}

/// Why an event about pages cannot be folded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfoldable {
    /// Its fields contradict each other.
    Inconsistent,
    /// A page was removed and one after it was not.
    Torn,
}

impl PageFold {
    /// `None` for an engine whose pages are blocks already.
    pub fn for_pages(page_size: u32) -> Option<Self> {
        let is_part =
            page_size > 0 && page_size < BLOCK_TOKENS && BLOCK_TOKENS.is_multiple_of(page_size);
        is_part.then(|| Self {
            page_size,
            pages: Pages::new(page_size),
            memory: None,
            clock: 0,
            forgotten: 0,
        })
    }

    #[must_use]
    pub fn with_memory(self, memory: MemoryAccount) -> Self {
        Self {
            memory: Some(memory),
            ..self
        }
    }

    pub fn memory_bytes(&self) -> usize {
        self.pages.bytes()
    }

    pub fn clear(&mut self) {
        self.pages = Pages::new(self.page_size);
        self.charge();
    }

    /// How many pages were forgotten, or not taken, for want of memory since this was last asked.
    pub fn take_forgotten(&mut self) -> u64 {
        std::mem::take(&mut self.forgotten)
    }

    /// The blocks that are whole now.
    pub fn store(&mut self, event: &Stored, tier: Tier) -> Result<Vec<Event>, Unfoldable> {
        let size = self.page_size as usize;
        let is_consistent = event.block_size == self.page_size
            && event.hashes.len().checked_mul(size) == Some(event.token_ids.len())
            // Each page depends on the token after it: a hit on the last page may be none.
            && event.extra_keys.iter().flatten().all(|key| matches!(key, ExtraKey::Lookahead(_)));
        if !is_consistent {
            return Err(Unfoldable::Inconsistent);
        }
        self.clock = self.clock.wrapping_add(1);
        let mut parent = event.parent;
        let mut stored = 0;
        for names in event.hashes.chunks(SLICE) {
            self.use_block_of(parent);
            if !self.make_room(names.len()) {
                self.forgotten += (event.hashes.len() - stored) as u64;
                break;
            }
            let tokens = &event.token_ids[stored * size..];
            self.store_slice(names, parent, tokens, tier);
            parent = names.last().copied().or(parent);
            stored += names.len();
        }
        self.charge();
        Ok(self.runs(event, stored, tier))
    }

    /// What a store continues is in use: the pages of its block, without which the new ones make no block.
    fn use_block_of(&mut self, parent: Option<EngineHash>) {
        let mut page = parent.and_then(|parent| self.pages.find(parent));
        while let Some(number) = page {
            let used = self.pages.get_mut(number);
            used.used_at = self.clock;
            page = Some(used.parent).filter(|parent| used.offset > 0 && *parent != NO_PAGE);
        }
    }

    fn store_slice(
        &mut self,
        names: &[EngineHash],
        parent: Option<EngineHash>,
        tokens: &[u32],
        tier: Tier,
    ) {
        // Making room may have dropped the pages that were found before.
        let before = parent.and_then(|parent| self.pages.find(parent));
        let mut offset = match before {
            Some(page) => self.next(self.pages.get(page).offset),
            // A block that another replica reported ends with the page that names it.
            None => 0,
        };
        let mut unknown = parent.filter(|_| before.is_none());
        let mut parent = before.unwrap_or(NO_PAGE);
        let tokens = tokens.chunks_exact(self.page_size as usize);
        for (name, tokens) in names.iter().zip(tokens) {
            let known = self.pages.find(*name);
            let page =
                known.unwrap_or_else(|| self.pages.add(*name, parent, unknown, offset, tokens));
            self.pages.set_stored(page, tier);
            let clock = self.clock;
            let stored = self.pages.get_mut(page);
            stored.used_at = clock;
            offset = stored.offset;
            offset = self.next(offset);
            (parent, unknown) = (page, None);
        }
    }

    /// The blocks that are no longer whole.
    pub fn remove(&mut self, event: &Removed, tier: Tier) -> Result<Vec<Event>, Unfoldable> {
        let mut names = Vec::new();
        for name in &event.hashes {
            let Some(page) = self.pages.find(*name) else {
                // It may name a block that another replica reported, or one whose pages were forgotten.
                names.push(*name);
                continue;
            };
            if self.pages.clear_stored(page, tier) && self.pages.get_mut(page).clear_whole(tier) {
                names.push(*name);
            }
        }
        for name in &event.hashes {
            let Some(number) = self.pages.find(*name) else {
                continue;
            };
            let page = self.pages.get(number);
            if page.children[tier as usize] > 0 && !page.is_stored(tier) {
                return Err(Unfoldable::Torn);
            }
            self.pages.drop_unused(number);
        }
        self.charge();
        if names.is_empty() {
            return Ok(Vec::new());
        }
        Ok(vec![Event::Removed(Removed {
            hashes: names,
            location: event.location.clone(),
        })])
    }

    /// Begins to give the memory of removed pages back, if most of it is unused, for the ranks that share it. No page
    /// may come or go before [`Self::shrink_next`] has returned false.
    pub fn begin_shrink(&self) -> Option<PageMove> {
        let page_move = self.pages.begin_move()?;
        if let Some(memory) = &self.memory {
            // Other ranks store while pages move, and both copies take memory.
            memory.charge(self.pages.bytes() + page_move.bytes());
        }
        Some(page_move)
    }

    /// Gives memory back in slices of `pages` pages. Returns false when it is given back.
    pub fn shrink_next(&mut self, page_move: &mut PageMove, pages: usize) -> bool {
        let goes_on = self.pages.move_next(page_move, pages);
        if !goes_on {
            self.charge();
        }
        goes_on
    }

    fn next(&self, offset: u8) -> u8 {
        let pages = (BLOCK_TOKENS / self.page_size) as u8;
        (offset + 1) % pages
    }

    /// The event's first `stored` pages as blocks that were not whole before: one store for each run of blocks that follow
    /// each other.
    fn runs(&mut self, event: &Stored, stored: usize, tier: Tier) -> Vec<Event> {
        let mut runs: Vec<Stored> = Vec::new();
        for name in &event.hashes[..stored] {
            let Some((parent, tokens)) = self.block(*name, tier) else {
                continue;
            };
            match runs.last_mut() {
                Some(run) if run.hashes.last().copied() == parent && parent.is_some() => {
                    run.hashes.push(*name);
                    run.token_ids.extend(tokens);
                }
                _ => runs.push(Stored {
                    hashes: vec![*name],
                    parent,
                    token_ids: tokens,
                    block_size: BLOCK_TOKENS,
                    lora_id: event.lora_id,
                    lora_name: event.lora_name.clone(),
                    cache_salt: event.cache_salt.clone(),
                    extra_keys: Vec::new(),
                    location: event.location.clone(),
                    spec_kind: event.spec_kind.clone(),
                    sliding_window: event.sliding_window,
                    session_id: event.session_id.clone(),
                }),
            }
        }
        runs.into_iter().map(Event::Stored).collect()
    }

    /// The page before the block that ends with this page, and the block's tokens. `None` unless the block is whole and
    /// was not before.
    fn block(&mut self, name: EngineHash, tier: Tier) -> Option<(Option<EngineHash>, Vec<u32>)> {
        let last = self.pages.find(name)?;
        let page = self.pages.get(last);
        if self.next(page.offset) != 0 || page.is_whole(tier) {
            return None;
        }
        let mut block: SmallVec<[PageNumber; BLOCK_TOKENS as usize]> = SmallVec::new();
        let mut number = last;
        loop {
            let page = self.pages.get(number);
            if !page.is_stored(tier) {
                return None;
            }
            block.push(number);
            if page.offset == 0 {
                break;
            }
            if page.parent == NO_PAGE {
                return None;
            }
            number = page.parent;
        }
        let pages = block.iter().rev();
        let tokens = pages.flat_map(|page| self.pages.tokens(*page)).copied();
        let tokens = tokens.collect();
        let parent = self.pages.parent_name(number);
        self.pages.get_mut(last).set_whole(tier);
        Some((parent, tokens))
    }

    /// Makes room for more pages, and returns whether there is room. Pages of the store at hand are not forgotten.
    fn make_room(&mut self, more: usize) -> bool {
        while !self.has_room_for(more) {
            let wanted = more.max(self.pages.len() / MIN_FORGOTTEN);
            if !self.forget_ends(wanted) && !self.forget_starts(wanted) {
                return false;
            }
        }
        true
    }

    fn has_room_for(&self, more: usize) -> bool {
        let bytes = self.pages.bytes_of(self.pages.len() + more);
        self.memory
            .as_ref()
            .is_none_or(|memory| memory.has_room_for(bytes))
    }

    /// Forgets about so many pages: the ends that were used longest ago, with what leads to no other page. Returns whether
    /// there was any.
    fn forget_ends(&mut self, wanted: usize) -> bool {
        let clock = self.clock;
        let age = |page: &pages::Page| clock.wrapping_sub(page.used_at);
        let mut leaves: Vec<(u32, PageNumber)> = self
            .pages
            .numbers()
            .filter(|page| !self.pages.is_free(*page) && self.pages.is_leaf(*page))
            .map(|page| (age(self.pages.get(page)), page))
            .filter(|(age, _)| *age > 0)
            .collect();
        leaves.sort_unstable_by(|one, other| other.cmp(one));
        let mut forgotten = 0;
        for (oldest, leaf) in leaves {
            let mut page = leaf;
            while forgotten < wanted
                && page != NO_PAGE
                && self.pages.is_leaf(page)
                && age(self.pages.get(page)) >= oldest
            {
                page = self.pages.forget_leaf(page);
                forgotten += 1;
            }
            if forgotten >= wanted {
                break;
            }
        }
        self.forgotten += forgotten as u64;
        forgotten > 0
    }

    /// Forgets so many pages of those that were used longest ago, where all ends are in use: the starts of few long chains.
    /// Returns whether there was any.
    fn forget_starts(&mut self, wanted: usize) -> bool {
        let age = |page: &PageNumber| self.clock.wrapping_sub(self.pages.get(*page).used_at);
        let mut oldest: Vec<(u32, Reverse<PageNumber>)> = self
            .pages
            .numbers()
            .filter(|page| !self.pages.is_free(*page))
            .map(|page| (age(&page), Reverse(page)))
            .filter(|(age, _)| *age > 0)
            .collect();
        oldest.sort_unstable_by(|one, other| other.cmp(one));
        oldest.truncate(wanted);
        let pages = oldest.iter().map(|(_, Reverse(page))| *page).collect();
        let forgotten = self.pages.forget(pages);
        self.forgotten += forgotten as u64;
        forgotten > 0
    }

    fn charge(&self) {
        if let Some(memory) = &self.memory {
            memory.charge(self.pages.bytes());
        }
    }
}

#[cfg(test)]
mod tests;
