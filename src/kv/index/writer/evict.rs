//! The memory limit: new pages while there is room, else the pages that were stored longest ago are dropped.
//!
//! A page is dropped for all trees that own its blocks: a block that one tree of several loses frees nothing. Chains
//! lose their ends first, and a page counts as stored when a page that continues it was.

use std::cmp::Reverse;
use std::sync::atomic::Ordering::{Relaxed, Release};

use super::page_rows::{PageMeta, RowChunk};
use super::tree_state::TreeState;
use super::{NAMES_BYTES, SIDE_BYTES, Writer};
use crate::kv::event::Tier;
use crate::kv::index::owner_sets::{EMPTY_SET, Slot};
use crate::kv::index::pages::{CHUNK, NO_ID, PageId, Pages, block_id, locate};
use crate::kv::index::shared::Shared;

/// What a chunk of pages takes with everything that belongs to it.
const CHUNK_BYTES: usize = CHUNK * Pages::BYTES + RowChunk::BYTES + NAMES_BYTES + SIDE_BYTES;

/// At least this part of the pages is dropped at once, so that not every store looks for the oldest pages.
const MIN_EVICTED: usize = 32;

/// How often one store drops pages for the memory of trees and sets. The next store goes on.
const MAX_ROUNDS: usize = 4;

impl Writer {
    /// Makes it likely that this many blocks find pages. Returns whether it took blocks from a tree.
    #[inline]
    pub(super) fn make_room(&mut self, shared: &Shared, blocks: usize) -> bool {
        let wanted = blocks / 16 + 3;
        if self.unused_pages() >= wanted && !shared.memory.is_over_limit() {
            return false;
        }
        self.make_or_evict_pages(shared, wanted)
    }

    fn unused_pages(&self) -> usize {
        self.chunks.len() * CHUNK - self.used_pages()
    }

    fn used_pages(&self) -> usize {
        self.first_unused as usize - self.free.len()
    }

    #[cold]
    fn make_or_evict_pages(&mut self, shared: &Shared, wanted: usize) -> bool {
        let made = self.chunks.len() * CHUNK;
        let is_short = self.unused_pages() < wanted;
        if is_short && made < shared.pages.max_pages() && shared.memory.has_room_for(CHUNK_BYTES) {
            shared.pages.make(made as PageId);
            self.chunks.push(RowChunk::new());
            self.charge(shared);
            return false;
        }
        let before = self.dropped_blocks;
        if is_short {
            self.evict(shared, wanted * 4);
        }
        for _ in 0..MAX_ROUNDS {
            let excess = self.excess_bytes(shared);
            if excess == 0 || self.used_pages() == 0 {
                break;
            }
            // As if all pages had an equal part of it.
            let part = self.used_pages() as u64 * excess as u64 / self.side_bytes().max(1) as u64;
            self.evict(shared, part as usize);
        }
        self.dropped_blocks > before
    }

    /// Bytes above the memory limit that dropping pages gives back: those of the trees, the sets and the tables beyond
    /// what was counted with the pages. The pages' own memory, and that of free sets, is only used again.
    fn excess_bytes(&self, shared: &Shared) -> usize {
        let chunks = self.chunks.len();
        let free_sets = self.sets.free_bytes();
        let side = self.side_bytes() - free_sets;
        let names = self.names.bytes();
        let excess =
            side.saturating_sub(chunks * SIDE_BYTES) + names.saturating_sub(chunks * NAMES_BYTES);
        excess.min(shared.memory.bytes_over_limit().saturating_sub(free_sets))
    }

    /// Drops at least `wanted` pages, if there are so many.
    fn evict(&mut self, shared: &Shared, wanted: usize) {
        self.note_continuations(shared);
        let in_use = (0..self.first_unused).filter_map(|page| {
            let meta = self.meta(page);
            (meta.owned > 0).then_some((meta.stored_at, Reverse(meta.depth), page))
        });
        let mut oldest: Vec<_> = in_use.collect();
        let wanted = wanted.max(oldest.len() / MIN_EVICTED).max(1);
        if wanted < oldest.len() {
            oldest.select_nth_unstable(wanted);
            oldest.truncate(wanted);
        }
        oldest.sort_unstable();
        for (_, _, page) in oldest {
            self.evict_page(shared, page);
        }
        self.names.remove_all_stale();
        for slot in 0..self.trees.len() as Slot {
            if let Some(mut tree) = self.take_tree(slot) {
                tree.shrink_if_sparse();
                self.put_back(slot, tree);
            }
        }
        self.shrink_tables(shared);
        self.charge(shared);
    }

    /// Notes at the pages before them when pages were stored.
    fn note_continuations(&mut self, shared: &Shared) {
        for page in 0..self.first_unused {
            let PageMeta {
                owned, stored_at, ..
            } = *self.meta(page);
            // What was stored before the last eviction was noted then.
            if owned == 0 || stored_at < self.evicted_at {
                continue;
            }
            let mut page = page;
            while let Some(before) = self.page_before(shared, page) {
                let meta = self.meta_mut(before);
                if meta.stored_at >= stored_at {
                    break;
                }
                meta.stored_at = stored_at;
                page = before;
            }
        }
        self.evicted_at = self.clock;
    }

    /// The page with the block before a page's first one.
    fn page_before(&self, shared: &Shared, page: PageId) -> Option<PageId> {
        let meta = self.meta(page);
        if meta.parent == NO_ID {
            return None;
        }
        let (before, offset) = locate(meta.parent);
        let (head, body) = shared.pages.get(before);
        let is_it = offset < head.len() && body.paths[offset].load(Relaxed) == meta.parent_path;
        is_it.then_some(before)
    }

    /// Takes a page's blocks from all trees, which frees the page.
    fn evict_page(&mut self, shared: &Shared, page: PageId) {
        self.invalidate(shared, page);
        let (head, body) = shared.pages.get(page);
        let mut last = EMPTY_SET;
        let mut owners = self.sets.owners(&shared.sets, last);
        for offset in 0..head.len() {
            let set = body.owners[offset].load(Relaxed);
            if set == EMPTY_SET {
                continue;
            }
            if set != last {
                owners = self.sets.owners(&shared.sets, set);
                last = set;
            }
            let block = block_id(page, offset);
            for (slot, residency) in &owners {
                if let Some(tree) = self.tree_mut(*slot) {
                    tree.set_copies(block, tree.copies(block, *residency), [0; Tier::COUNT]);
                    tree.drop_alias(block);
                    tree.discount_page(page, 1);
                    tree.was_evicted = true;
                }
            }
            self.memberships -= owners.len() as u64;
            self.dropped_blocks += owners.len() as u64;
            body.owners[offset].store(EMPTY_SET, Release);
            self.sets.release(&shared.sets, set, 1);
            self.note_unowned(page, offset);
        }
        self.refresh(shared, page);
    }

    /// Makes tables smaller that are nearly empty.
    pub(super) fn shrink_tables(&mut self, shared: &Shared) {
        self.starts.shrink(&shared.starts);
        self.forks.shrink(&shared.forks);
        self.sets.shrink();
    }

    /// Puts a tree's state back after a change, and counts its memory.
    pub(super) fn put_back(&mut self, slot: Slot, mut tree: Box<TreeState>) {
        let bytes = tree.bytes();
        self.trees_bytes = self.trees_bytes + bytes - tree.counted_bytes;
        tree.counted_bytes = bytes;
        self.trees[slot as usize] = Some(tree);
    }

    /// Charges the memory budget with what the index takes now.
    pub(in crate::kv::index) fn charge(&self, shared: &Shared) {
        shared.memory.charge(self.limited_bytes());
    }
}
