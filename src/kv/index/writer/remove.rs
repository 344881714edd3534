//! Removes blocks from a tree: one copy of each named block, or whole blocks.

use std::ops::Range;
use std::sync::atomic::Ordering::{Relaxed, Release};

use super::Writer;
use super::copies::{UNKNOWN, residency_of};
use super::page_rows::{PageMeta, PageRow};
use super::tree_state::TreeState;
use crate::kv::block::SEGMENT_BLOCKS;
use crate::kv::event::{EngineHash, Tier};
use crate::kv::index::owner_sets::{EMPTY_SET, Residency, SetId, Slot, sole_owner};
use crate::kv::index::pages::{BlockId, CHUNK, NO_ID, PageId, block_id, locate};
use crate::kv::index::shared::Shared;
use crate::kv::index::simd::prefetch;
use crate::kv::index::sync::AtomicU32;

/// A page while blocks are removed from it.
struct Removal {
    page: PageId,
    /// How many blocks the tree no longer owns.
    removed: usize,
    /// The owner set that all blocks of the page had and those still have that come before `first`; none if they differ.
    common: SetId,
    first: usize,
    /// Whether maps of the tree may have changed their size.
    has_changed_maps: bool,
}

impl Removal {
    fn of(page: PageId) -> Self {
        Self {
            page,
            removed: 0,
            common: EMPTY_SET,
            first: SEGMENT_BLOCKS,
            has_changed_maps: false,
        }
    }
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
        if let ([name], Tier::Gpu) = (names, tier)
            && self.remove_page_end(shared, slot, *name)
        {
            return 0;
        }
        let Some(mut tree) = self.take_tree(slot) else {
            return names.len();
        };
        let mut missing = 0;
        // Engines remove a chain from its end, so the next name is likely that of the block before; also after the last
        // call.
        let mut guess = tree.next_removed.unwrap_or(NO_ID);
        let mut removal = Removal::of(NO_ID);
        let mut is_smaller = false;
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
                is_smaller |= self.finish(shared, &mut tree, &removal);
                removal = Removal::of(page);
                let common = &shared.pages.get(page).0.common;
                removal.common = common.load(Relaxed);
                common.store(EMPTY_SET, Relaxed);
                // Of calls with one name each, some are enough.
                if names.len() > 1 || offset % 8 == 7 {
                    self.prefetch_parent(shared, page);
                }
            }
            let mut run = 0;
            if tier == Tier::Gpu && tree.is_plain(block) {
                run = self.remove_owner_from_run(shared, &tree, slot, block, left, &mut removal);
                tree.blocks[Tier::Gpu as usize] -= run as u64;
            }
            if run == 0 {
                removal.common = EMPTY_SET;
                removal.has_changed_maps = true;
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
        tree.next_removed = (guess != NO_ID).then_some(guess);
        is_smaller |= self.finish(shared, &mut tree, &removal);
        if is_smaller {
            tree.shrink_if_sparse();
            self.put_back(slot, tree);
            self.shrink_tables(shared);
        } else {
            self.trees[slot as usize] = Some(tree);
        }
        if self.blocks == 0 {
            self.names.remove_all_stale();
        }
        missing
    }

    /// Removes the block before the one that was removed last, if it has this name, only this tree owns it, and it is
    /// the last one of its page, but not the first. Engines that evict report most blocks so, and one at a time.
    #[inline]
    fn remove_page_end(&mut self, shared: &Shared, slot: Slot, name: EngineHash) -> bool {
        let Some(tree) = self.trees.get_mut(slot as usize).and_then(Option::as_mut) else {
            return false;
        };
        let Some(block) = tree.next_removed else {
            return false;
        };
        let (page, last) = locate(block);
        let (head, body) = shared.pages.get(page);
        let chunk = &mut self.chunks[page as usize / CHUNK];
        let is_it = last > 0
            && head.len() == last + 1
            && chunk.has_name(page, last, name.0)
            && body.owners[last].load(Relaxed) == sole_owner(slot, Residency::Gpu)
            && body.owners[last - 1].load(Relaxed) != EMPTY_SET
            && tree.is_plain(block);
        if !is_it {
            return false;
        }
        let PageMeta { owned, named, .. } = &mut chunk.rows[page as usize % CHUNK].meta;
        *owned -= 1;
        *named &= !(1 << last);
        self.names.remove_soon(name.0, block);
        self.blocks -= 1;
        self.memberships -= 1;
        tree.blocks[Tier::Gpu as usize] -= 1;
        tree.discount_page(page, 1);
        tree.next_removed = Some(block - 1);
        let common = match head.common.load(Relaxed) {
            EMPTY_SET => body.common(last),
            common => common,
        };
        head.open();
        body.owners[last].store(EMPTY_SET, Relaxed);
        head.last.store(body.paths[last - 1].load(Relaxed), Relaxed);
        head.common.store(common, Relaxed);
        head.close(last);
        if last == SEGMENT_BLOCKS / 2 {
            self.prefetch_parent(shared, page);
        }
        true
    }

    /// Removes the tree from the owners of a page's blocks, from `block` backwards, as long as they have
    /// these names and the same owners, and are plain to the tree, as the first one is. Returns how many; none if the
    /// tree does not have the first one in the GPU.
    fn remove_owner_from_run(
        &mut self,
        shared: &Shared,
        tree: &TreeState,
        slot: Slot,
        block: BlockId,
        names: &[EngineHash],
        removal: &mut Removal,
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
        let row = &mut self.chunks[page as usize / CHUNK].rows[page as usize % CHUNK];
        let PageRow { meta, names: known } = row;
        // The block itself has the first name. Those before it have names back to the first that has none.
        let unnamed = !meta.named & ((1 << last) - 1);
        let floor = (u32::BITS - unnamed.leading_zeros()) as usize;
        let before = known[floor..last].iter().zip(&body.owners[floor..last]);
        let before = before.zip(block_id(page, floor)..block);
        let before = before.rev().zip(&names[1..]);
        let is_next =
            |(((known, owners), block), name): &(((&u64, &AtomicU32), BlockId), &EngineHash)| {
                **known == name.0 && owners.load(Relaxed) == old && tree.is_plain(*block)
            };
        let run = 1 + before.take_while(is_next).count();
        let first = last + 1 - run;
        self.sets.retain(new, run as u32);
        for owners in &body.owners[first..=last] {
            owners.store(new, Release);
        }
        if new == EMPTY_SET {
            self.blocks -= run as u64;
            meta.owned -= run as u32;
            for offset in (first..=last).rev() {
                if meta.named >> offset & 1 == 1 {
                    self.names
                        .remove_soon(known[offset], block_id(page, offset));
                }
            }
            meta.named &= !(((1 << run) - 1) << first);
            removal.first = removal.first.min(first);
        } else {
            removal.common = EMPTY_SET;
        }
        removal.removed += run;
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

    /// Whether a guessed block is the one that the tree knows by this name.
    #[inline]
    pub(super) fn is_block_named(
        &self,
        shared: &Shared,
        tree: &TreeState,
        slot: Slot,
        guess: BlockId,
        name: EngineHash,
    ) -> bool {
        guess != NO_ID
            && self.has_name(guess, name)
            && self.owns_by_table_name(shared, tree, slot, guess)
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

    /// Brings a page and the tree up to date. Returns whether the tree's maps may have changed their size, or the page
    /// is free.
    fn finish(&mut self, shared: &Shared, tree: &mut TreeState, removal: &Removal) -> bool {
        let page = removal.page;
        if page == NO_ID {
            return false;
        }
        let has_left = tree.discount_page(page, removal.removed);
        self.memberships -= removal.removed as u64;
        if removal.common != EMPTY_SET && removal.first > 0 {
            let (head, body) = shared.pages.get(page);
            let is_at_end = || {
                let removed = &body.owners[removal.first..head.len()];
                removed
                    .iter()
                    .all(|owners| owners.load(Relaxed) == EMPTY_SET)
            };
            if is_at_end() {
                // The blocks that are left still have the same owners.
                head.open();
                let last = body.paths[removal.first - 1].load(Relaxed);
                head.last.store(last, Relaxed);
                head.common.store(removal.common, Relaxed);
                head.close(removal.first);
                return has_left || removal.has_changed_maps;
            }
        }
        self.refresh(shared, page);
        has_left || removal.has_changed_maps || self.meta(page).owned == 0
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
        let mut removal = Removal::of(page);
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
        }
        self.names.remove_all_stale();
        tree.shrink();
        self.put_back(slot, tree);
        self.shrink_tables(shared);
    }
}
