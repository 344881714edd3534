//! Further copies of blocks that a tree knows by their names, as engines report them when they copy blocks to a lower
//! tier. Such events often lack the tokens or the extra keys of their blocks, so the names alone count.

use rustc_hash::FxHashSet;

use super::Writer;
use super::copies::{StoreContext, UNKNOWN};
use super::tree_state::TreeState;
use crate::kv::event::{EngineHash, Tier};
use crate::kv::index::owner_sets::{Residency, Slot};
use crate::kv::index::pages::{BlockId, NO_ID, PageId, locate};
use crate::kv::index::shared::Shared;
use crate::kv::index::types::{CopyReport, NewBlock, Parent};

impl Writer {
    /// Stores blocks in a lower tier: one more copy of each that the tree knows by its name, wherever the event puts
    /// it; the others follow the block before them. Returns how many could not be placed, or are known by another name.
    pub(in crate::kv::index) fn store_lower(
        &mut self,
        shared: &Shared,
        slot: Slot,
        parent: Parent,
        blocks: &[NewBlock],
        tier: Tier,
        copies: CopyReport,
    ) -> usize {
        self.misnamed = 0;
        let mut unplaced = 0;
        let mut after = parent;
        let mut left = blocks;
        while !left.is_empty() {
            let is_known = |writer: &Self, block: &NewBlock| {
                let tree = writer.tree(slot);
                tree.is_some_and(|tree| writer.resolve(shared, tree, slot, block.name).is_some())
            };
            let known = left
                .iter()
                .take_while(|block| is_known(self, block))
                .count();
            // A name that comes again in the same event is known by then.
            let mut names = FxHashSet::default();
            let new = left[known..]
                .iter()
                .take_while(|block| !is_known(self, block) && names.insert(block.name));
            let (run, rest) = left.split_at(known + new.count());
            let (known, new) = run.split_at(known);
            let names = known.iter().map(|block| block.name);
            self.add_copies(shared, slot, names, tier, copies);
            if let Some(last) = known.last() {
                after = Parent::Block(last.name);
            }
            if let Some(last) = new.last() {
                if self.store(shared, slot, after, new, tier, copies).is_err() {
                    unplaced += new.len();
                }
                after = Parent::Block(last.name);
            }
            left = rest;
        }
        unplaced + std::mem::take(&mut self.misnamed)
    }

    /// Adds one copy of each block that the tree knows by its name. Returns how many it does not know.
    pub(in crate::kv::index) fn add_copies(
        &mut self,
        shared: &Shared,
        slot: Slot,
        names: impl Iterator<Item = EngineHash>,
        tier: Tier,
        copies: CopyReport,
    ) -> usize {
        let Some(mut tree) = self.take_tree(slot) else {
            return names.count();
        };
        let store = StoreContext::new(slot, tier, copies);
        let mut unknown = 0;
        let mut changing: PageId = NO_ID;
        for name in names {
            let Some(block) = self.resolve(shared, &tree, slot, name) else {
                unknown += 1;
                continue;
            };
            let (page, _) = locate(block);
            if changing != page {
                if changing != NO_ID {
                    self.refresh(shared, changing);
                }
                self.invalidate(shared, page);
                changing = page;
            }
            self.add_owner(shared, &mut tree, store, block);
        }
        if changing != NO_ID {
            self.refresh(shared, changing);
        }
        self.put_back(slot, tree);
        unknown
    }

    /// Whether the tree has a copy of a block in a tier, so that one can be removed. An unknown number of copies
    /// counts as one from now on, as it does at a removal.
    pub(in crate::kv::index) fn count_copy_to_remove(
        &mut self,
        shared: &Shared,
        slot: Slot,
        name: EngineHash,
        tier: Tier,
    ) -> bool {
        let Some(mut tree) = self.take_tree(slot) else {
            return false;
        };
        let block = self.resolve(shared, &tree, slot, name);
        let has_copy =
            block.is_some_and(|block| self.count_unknown(shared, &mut tree, slot, block, tier));
        self.put_back(slot, tree);
        has_copy
    }

    /// How many copies of a block the tree has in a tier; an unknown number counts as one.
    pub(in crate::kv::index) fn copies_of(
        &self,
        shared: &Shared,
        slot: Slot,
        name: EngineHash,
        tier: Tier,
    ) -> u32 {
        let Some(tree) = self.tree(slot) else {
            return 0;
        };
        let Some(block) = self.resolve(shared, tree, slot, name) else {
            return 0;
        };
        match tree.copies(block, self.residency(shared, slot, block))[tier as usize] {
            UNKNOWN => 1,
            count => count.into(),
        }
    }

    fn count_unknown(
        &mut self,
        shared: &Shared,
        tree: &mut TreeState,
        slot: Slot,
        block: BlockId,
        tier: Tier,
    ) -> bool {
        let residency = self.residency(shared, slot, block);
        let old = tree.copies(block, residency);
        if residency == Residency::Absent || old[tier as usize] == 0 {
            return false;
        }
        if old[tier as usize] == UNKNOWN {
            let mut new = old;
            new[tier as usize] = 1;
            tree.set_copies(block, old, new);
        }
        true
    }
}
