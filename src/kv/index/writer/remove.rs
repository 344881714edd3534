//! Removes blocks from a tree: one copy of each named block, or whole blocks.

use std::ops::Range;
use std::sync::atomic::Ordering::{Relaxed, Release};

use super::Writer;
use super::copies::{UNKNOWN, residency_of};
use super::page_rows::PageRow;
use super::tree_state::TreeState;
use crate::kv::event::{EngineHash, Tier};
use crate::kv::index::owner_sets::{EMPTY_SET, Residency, Slot};
use crate::kv::index::pages::{BlockId, CHUNK, NO_ID, PageId, block_id, locate};
use crate::kv::index::shared::Shared;
use crate::kv::index::simd::prefetch;

/// A page while blocks are removed from it, and how many the tree no longer owns.
struct Removal {
    page: PageId,
    removed: usize,
}

impl Writer {
    /// Removes one copy of each block. Returns for how many names the tree had none in that tier.
    pub(in crate::kv::index) fn remove(
        &mut self,
        shared: &Shared,
        slot: Slot,
        names: &[EngineHash],
        tier: Tier,
    ) -> usize {
        let Some(mut tree) = self.take_tree(slot) else {
            return names.len();
        };
        let mut missing = 0;
        // Engines remove a chain from its end, so the next name is likely that of the block before.
        let mut guess = NO_ID;
        let mut removal = Removal {
            page: NO_ID,
            removed: 0,
        };
        let mut left = names;
        while let [name, rest @ ..] = left {
            let found = self
                .is_block_named(shared, &tree, slot, guess, *name)
                .then_some(guess)
                .or_else(|| self.resolve(shared, &tree, slot, *name));
            let Some(block) = found else {
                missing += 1;
                guess = NO_ID;
                left = rest;
                continue;
            };
            let (page, offset) = locate(block);
            if removal.page != page {
                self.finish(shared, &mut tree, &removal);
                removal = Removal { page, removed: 0 };
                self.invalidate(shared, page);
                self.prefetch_parent(shared, page);
            }
            let mut run = 0;
            if tier == Tier::Gpu && tree.has_default_copies() && !tree.has_aliases() {
                run = self.remove_owner_from_run(shared, slot, block, left);
                tree.blocks[Tier::Gpu as usize] -= run as u64;
                removal.removed += run;
            }
            if run == 0 {
                match self.remove_copy(shared, &mut tree, slot, block, tier) {
                    Some(Residency::Absent) => removal.removed += 1,
                    Some(_) => {}
                    None => missing += 1,
                }
                run = 1;
            }
            left = &left[run..];
            guess = match offset + 1 - run {
                0 => self.meta(page).parent,
                offset => block_id(page, offset - 1),
            };
        }
        self.finish(shared, &mut tree, &removal);
        self.purge_names();
        tree.shrink_if_sparse();
        self.put_back(slot, tree);
        self.shrink_tables(shared);
        missing
    }

    /// Removes the tree from the owners of a page's blocks, from `block` backwards, as long as they have
    /// these names and the same owners. Returns how many; none if the tree does not have the first one
    /// in the GPU. The tree must have no aliases and only default copies.
    fn remove_owner_from_run(
        &mut self,
        shared: &Shared,
        slot: Slot,
        block: BlockId,
        names: &[EngineHash],
    ) -> usize {
        let (page, last) = locate(block);
        let (_, body) = shared.pages.get(page);
        let old = body.owners[last].load(Relaxed);
        if self.sets.residency(&shared.sets, old, slot) != Residency::Gpu {
            return 0;
        }
        let new = self
            .sets
            .with_residency(&shared.sets, old, slot, Residency::Absent);
        let chunk = &mut self.chunks[page as usize / CHUNK];
        let mut run = 0;
        for (name, offset) in names.iter().zip((0..=last).rev()) {
            let is_next = run == 0 || chunk.has_name(page, offset, name.0);
            if !is_next || body.owners[offset].load(Relaxed) != old {
                break;
            }
            run += 1;
        }
        let first = last + 1 - run;
        self.sets.retain(new, run as u32);
        for owners in &body.owners[first..=last] {
            owners.store(new, Release);
        }
        if new == EMPTY_SET {
            self.blocks -= run as u64;
            let PageRow { meta, names } = &mut chunk.rows[page as usize % CHUNK];
            meta.owned -= run as u32;
            for offset in (first..=last).rev() {
                if meta.named >> offset & 1 == 1 {
                    self.stale_names
                        .push((names[offset], block_id(page, offset)));
                }
            }
            meta.named &= !(((1 << run) - 1) << first);
        }
        self.sets.release(&shared.sets, old, run as u32);
        run
    }

    /// Asks for the cache lines of the page that a removal likely goes on to.
    #[inline]
    fn prefetch_parent(&self, shared: &Shared, page: PageId) {
        let parent = self.meta(page).parent;
        if parent != NO_ID {
            let (page, offset) = locate(parent);
            let (head, body) = shared.pages.get(page);
            let names = &self.chunk(page).rows[page as usize % CHUNK].names;
            prefetch(head);
            prefetch(&body.owners);
            prefetch(&names[offset]);
            prefetch(&names[offset / 2]);
            prefetch(self.meta(page));
        }
    }

    /// Whether a guessed block is the one that the tree knows by this name. A tree with aliases must
    /// look the name up.
    #[inline]
    pub(super) fn is_block_named(
        &self,
        shared: &Shared,
        tree: &TreeState,
        slot: Slot,
        guess: BlockId,
        name: EngineHash,
    ) -> bool {
        if guess == NO_ID || tree.has_aliases() {
            return false;
        }
        self.has_name(guess, name) && self.residency(shared, slot, guess) != Residency::Absent
    }

    /// Removes one copy. Returns where the tree still has the block; none if it had no copy in that tier.
    fn remove_copy(
        &mut self,
        shared: &Shared,
        tree: &mut TreeState,
        slot: Slot,
        block: BlockId,
        tier: Tier,
    ) -> Option<Residency> {
        let residency = self.residency(shared, slot, block);
        let old = tree.copies(block, residency);
        let mut new = old;
        let copies = &mut new[tier as usize];
        *copies = match *copies {
            0 => return None,
            UNKNOWN => 0,
            count => count - 1,
        };
        let left = residency_of(new);
        tree.set_copies(block, old, new);
        self.set_residency(shared, slot, block, left);
        if left == Residency::Absent {
            tree.drop_alias(block);
        }
        Some(left)
    }

    fn finish(&mut self, shared: &Shared, tree: &mut TreeState, removal: &Removal) {
        if removal.page == NO_ID {
            return;
        }
        tree.discount_page(removal.page, removal.removed);
        self.memberships -= removal.removed as u64;
        self.refresh(shared, removal.page);
    }

    /// Removes all copies of one block from a tree.
    pub(super) fn forget(
        &mut self,
        shared: &Shared,
        tree: &mut TreeState,
        slot: Slot,
        block: BlockId,
    ) {
        let (page, offset) = locate(block);
        self.forget_in_page(shared, tree, slot, page, offset..offset + 1);
        self.purge_names();
    }

    /// Removes all copies of a tree's blocks in a part of a page. Returns how many blocks.
    pub(super) fn forget_in_page(
        &mut self,
        shared: &Shared,
        tree: &mut TreeState,
        slot: Slot,
        page: PageId,
        offsets: Range<usize>,
    ) -> usize {
        let mut removal = Removal { page, removed: 0 };
        self.invalidate(shared, page);
        for offset in offsets {
            let block = block_id(page, offset);
            let residency = self.residency(shared, slot, block);
            if residency == Residency::Absent {
                continue;
            }
            let old = tree.copies(block, residency);
            tree.set_copies(block, old, [0; Tier::COUNT]);
            self.set_residency(shared, slot, block, Residency::Absent);
            tree.drop_alias(block);
            removal.removed += 1;
        }
        self.finish(shared, tree, &removal);
        removal.removed
    }

    /// Removes all blocks of a tree.
    pub(in crate::kv::index) fn clear(&mut self, shared: &Shared, slot: Slot) {
        let Some(mut tree) = self.take_tree(slot) else {
            return;
        };
        let mut pages: Vec<PageId> = tree.pages().collect();
        // The last page first, so that free pages are handed out again in ascending order.
        pages.sort_unstable_by(|a, b| b.cmp(a));
        for page in pages {
            let len = shared.pages.get(page).0.len();
            self.forget_in_page(shared, &mut tree, slot, page, 0..len);
            if self.stale_names.len() >= 64 {
                self.purge_names();
            }
        }
        self.purge_names();
        tree.shrink();
        self.put_back(slot, tree);
        self.stale_names = Vec::new();
        self.shrink_tables(shared);
    }
}
