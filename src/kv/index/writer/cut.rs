//! The memory bound: what is taken from whom when there is no room left.

use std::cmp::Reverse;

use super::{Chunk, Known, NAMES_BYTES, SIDE_BYTES, Writer};
use crate::kv::index::Shared;
use crate::kv::index::holders::Slot;
use crate::kv::index::pages::{CHUNK, PageId, Pages};

/// What a chunk of pages takes with all that belongs to them.
const CHUNK_BYTES: usize = CHUNK * Pages::BYTES + Chunk::BYTES + NAMES_BYTES + SIDE_BYTES;

impl Writer {
    /// Makes it likely that so many blocks find pages. Returns whether it took any from a tree.
    #[inline]
    pub(super) fn make_room(&mut self, shared: &Shared, blocks: usize) -> bool {
        let wanted = blocks / 16 + 3;
        if self.free.len() + self.chunks.len() * CHUNK - self.fresh as usize >= wanted
            && !shared.budget.is_over()
        {
            return false;
        }
        self.make_room_for(shared, wanted)
    }

    #[cold]
    fn make_room_for(&mut self, shared: &Shared, wanted: usize) -> bool {
        let made = self.chunks.len() * CHUNK;
        if made < shared.pages.pages_max() && shared.budget.has_room_for(CHUNK_BYTES) {
            shared.pages.make(made as PageId);
            self.chunks.push(Chunk::new());
            self.charge(shared);
            return false;
        }
        // More than is needed now, so that it is not needed again at once.
        let mut wanted = (wanted * 4).max(made / 64);
        let before = self.cut_blocks;
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
            let freed = self.cut(shared, slot as Slot, wanted);
            wanted = wanted.saturating_sub(freed);
        }
        self.charge(shared);
        self.cut_blocks > before
    }

    /// Takes a tree's deepest blocks until so many pages are free, or the tree is empty.
    fn cut(&mut self, shared: &Shared, slot: Slot, wanted: usize) -> usize {
        let Some(mut known) = self.trees[slot as usize].take() else {
            return 0;
        };
        let before = self.free.len();
        let mut pages: Vec<PageId> = known.pages().collect();
        pages.sort_unstable_by_key(|page| (Reverse(self.meta(*page).depth), Reverse(*page)));
        for page in pages {
            let len = shared.pages.at(page).0.len();
            let gone = self.forget_in_page(shared, &mut known, slot, page, 0..len);
            self.cut_blocks += gone as u64;
            if self.free.len() - before >= wanted {
                break;
            }
        }
        self.bury();
        known.was_cut = true;
        known.shrink();
        self.count_bytes(&mut known);
        self.trees[slot as usize] = Some(known);
        self.free.len() - before
    }

    pub(super) fn count_bytes(&mut self, known: &mut Known) {
        let bytes = known.bytes();
        self.trees_bytes = self.trees_bytes + bytes - known.counted_bytes;
        known.counted_bytes = bytes;
    }

    /// Tells the budget what the index takes now.
    pub(in crate::kv::index) fn charge(&self, shared: &Shared) {
        shared.budget.charge(self.bounded_bytes());
    }
}
