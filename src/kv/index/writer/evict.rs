//! The memory limit: new pages while there is room, else pages taken from the coldest tree.

use std::cmp::Reverse;

use super::page_rows::RowChunk;
use super::tree_state::TreeState;
use super::{NAMES_BYTES, SIDE_BYTES, Writer};
use crate::kv::index::owner_sets::Slot;
use crate::kv::index::pages::{CHUNK, PageId, Pages};
use crate::kv::index::shared::Shared;

/// What a chunk of pages takes with everything that belongs to it.
const CHUNK_BYTES: usize = CHUNK * Pages::BYTES + RowChunk::BYTES + NAMES_BYTES + SIDE_BYTES;

impl Writer {
    /// Makes it likely that this many blocks find pages. Returns whether it took blocks from a tree.
    #[inline]
    pub(super) fn make_room(&mut self, shared: &Shared, blocks: usize) -> bool {
        let wanted = blocks / 16 + 3;
        if self.free.len() + self.chunks.len() * CHUNK - self.first_unused as usize >= wanted
            && !shared.memory.is_over_limit()
        {
            return false;
        }
        self.make_or_evict_pages(shared, wanted)
    }

    #[cold]
    fn make_or_evict_pages(&mut self, shared: &Shared, wanted: usize) -> bool {
        let made = self.chunks.len() * CHUNK;
        if made < shared.pages.max_pages() && shared.memory.has_room_for(CHUNK_BYTES) {
            shared.pages.make(made as PageId);
            self.chunks.push(RowChunk::new());
            self.charge(shared);
            return false;
        }
        // More than is needed now, so that the next store does not evict again.
        let mut wanted = (wanted * 4).max(made / 64);
        let before = self.dropped_blocks;
        while wanted > 0 {
            let coldest = self
                .trees
                .iter()
                .enumerate()
                .filter_map(|(slot, tree)| Some((slot, tree.as_ref()?)))
                .filter(|(_, tree)| tree.len > 0)
                .min_by_key(|(_, tree)| tree.stored_at);
            let Some((slot, _)) = coldest else {
                break;
            };
            let freed = self.evict(shared, slot as Slot, wanted);
            wanted = wanted.saturating_sub(freed);
        }
        self.charge(shared);
        self.dropped_blocks > before
    }

    /// Takes a tree's deepest blocks until `wanted` pages are free or the tree is empty. Returns how
    /// many pages that freed.
    fn evict(&mut self, shared: &Shared, slot: Slot, wanted: usize) -> usize {
        let Some(mut tree) = self.take_tree(slot) else {
            return 0;
        };
        let before = self.free.len();
        let mut pages: Vec<PageId> = tree.pages().collect();
        pages.sort_unstable_by_key(|page| (Reverse(self.meta(*page).depth), Reverse(*page)));
        for page in pages {
            let len = shared.pages.get(page).0.len();
            let removed = self.forget_in_page(shared, &mut tree, slot, page, 0..len);
            self.dropped_blocks += removed as u64;
            if self.free.len() - before >= wanted {
                break;
            }
        }
        self.purge_names();
        tree.was_evicted = true;
        tree.shrink();
        self.put_back(slot, tree);
        self.free.len() - before
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
