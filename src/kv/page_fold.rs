//! Folds the pages of engines that cache in small pages (SGLang, often one token each) into blocks, so that a prompt of a
//! hundred thousand tokens has some thousands of blocks to look up, not a hundred thousand. Pure.
//!
//! A block is stored while all of its pages are, and has the name of its last page. Pages are leaves first removed, as in
//! a radix tree: a removal that would leave a page without the one before it is not understood, and clears the tree.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::event::{EngineHash, Event, Removed, Stored, Tier};

/// Tokens of a block, where pages are smaller.
pub const BLOCK_TOKENS: u32 = 16;
/// The cache of one rank in pages of one token. They take about 100 bytes each.
const MAX_PAGES: usize = 2 << 20;

/// The pages of one rank's cache, as its engine reported them.
#[derive(Debug)]
pub struct PageFold {
    page_size: u32,
    pages: FxHashMap<EngineHash, Page>,
}

#[derive(Debug)]
struct Page {
    parent: Option<EngineHash>,
    tokens: SmallVec<[u32; 2]>,
    /// Pages before it in its block.
    offset: u8,
    /// By tier: whether it is stored.
    stored: [bool; Tier::COUNT],
    /// By tier: whether the block that ends with it was reported as stored.
    whole: [bool; Tier::COUNT],
    /// By tier: stored pages that follow it.
    children: [u32; Tier::COUNT],
}

/// Why an event about pages cannot be folded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfoldable {
    /// Its fields contradict each other.
    Inconsistent,
    /// More pages than any cache has.
    TooMany,
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
            pages: FxHashMap::default(),
        })
    }

    pub fn page_size(&self) -> u32 {
        self.page_size
    }

    pub fn clear(&mut self) {
        self.pages = FxHashMap::default();
    }

    /// The blocks that are whole now.
    pub fn store(&mut self, event: &Stored, tier: Tier) -> Result<Vec<Event>, Unfoldable> {
        let size = self.page_size as usize;
        let is_consistent = event.block_size == self.page_size
            && event.hashes.len().checked_mul(size) == Some(event.token_ids.len())
            && event.extra_keys.is_empty();
        if !is_consistent {
            return Err(Unfoldable::Inconsistent);
        }
        if self.pages.len() + event.hashes.len() > MAX_PAGES {
            return Err(Unfoldable::TooMany);
        }
        let mut parent = event.parent;
        let mut offset = match parent.and_then(|parent| self.pages.get(&parent)) {
            Some(page) => self.next(page.offset),
            // A block that another replica reported ends with the page that names it.
            None => 0,
        };
        for (name, tokens) in event.hashes.iter().zip(event.token_ids.chunks_exact(size)) {
            let page = self.pages.entry(*name).or_insert_with(|| Page {
                parent,
                tokens: tokens.into(),
                offset,
                stored: [false; Tier::COUNT],
                whole: [false; Tier::COUNT],
                children: [0; Tier::COUNT],
            });
            let was_stored = std::mem::replace(&mut page.stored[tier as usize], true);
            offset = page.offset;
            let before = page.parent;
            if !was_stored
                && let Some(before) = before.and_then(|before| self.pages.get_mut(&before))
            {
                before.children[tier as usize] += 1;
            }
            parent = Some(*name);
            offset = self.next(offset);
        }
        Ok(self.runs(event, tier))
    }

    /// The blocks that are no longer whole.
    pub fn remove(&mut self, event: &Removed, tier: Tier) -> Result<Vec<Event>, Unfoldable> {
        let mut names = Vec::new();
        for name in &event.hashes {
            let Some(page) = self.pages.get_mut(name) else {
                // It may name a block that another replica reported.
                names.push(*name);
                continue;
            };
            if !std::mem::take(&mut page.stored[tier as usize]) {
                continue;
            }
            if std::mem::take(&mut page.whole[tier as usize]) {
                names.push(*name);
            }
            if let Some(before) = page.parent.and_then(|before| self.pages.get_mut(&before)) {
                let children = &mut before.children[tier as usize];
                *children = children.saturating_sub(1);
            }
        }
        for name in &event.hashes {
            let Some(page) = self.pages.get(name) else {
                continue;
            };
            if page.children[tier as usize] > 0 && !page.stored[tier as usize] {
                return Err(Unfoldable::Torn);
            }
            if !page.stored.contains(&true) && page.children == [0; Tier::COUNT] {
                self.pages.remove(name);
            }
        }
        let removed = Removed {
            hashes: names,
            location: event.location.clone(),
        };
        Ok(match removed.hashes.is_empty() {
            true => Vec::new(),
            false => vec![Event::Removed(removed)],
        })
    }

    fn next(&self, offset: u8) -> u8 {
        let pages = (BLOCK_TOKENS / self.page_size) as u8;
        (offset + 1) % pages
    }

    fn is_last(&self, page: &Page) -> bool {
        self.next(page.offset) == 0
    }

    /// The event's pages as blocks that were not whole before: one store for each run of blocks that follow each other.
    fn runs(&mut self, event: &Stored, tier: Tier) -> Vec<Event> {
        let mut runs: Vec<Stored> = Vec::new();
        for name in &event.hashes {
            let Some((parent, tokens)) = self.block(*name, tier) else {
                continue;
            };
            if let Some(page) = self.pages.get_mut(name) {
                page.whole[tier as usize] = true;
            }
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
    fn block(&self, name: EngineHash, tier: Tier) -> Option<(Option<EngineHash>, Vec<u32>)> {
        let last = self.pages.get(&name)?;
        if !self.is_last(last) || last.whole[tier as usize] {
            return None;
        }
        let mut pages: SmallVec<[&Page; BLOCK_TOKENS as usize]> = SmallVec::new();
        let mut page = last;
        loop {
            if !page.stored[tier as usize] {
                return None;
            }
            pages.push(page);
            if page.offset == 0 {
                break;
            }
            page = self.pages.get(&page.parent?)?;
        }
        let tokens = pages.iter().rev().flat_map(|page| page.tokens.iter());
        Some((page.parent, tokens.copied().collect()))
    }
}

#[cfg(test)]
mod tests;
