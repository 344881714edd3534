//! Makes a tree own blocks that the index already has, and gives blocks their names.

use std::sync::atomic::Ordering::{Relaxed, Release};

use super::Writer;
use super::copies::{StoreContext, UNKNOWN, residency_of};
use super::tree_state::TreeState;
use crate::kv::event::{EngineHash, Tier};
use crate::kv::index::name_table::Insert;
use crate::kv::index::owner_sets::{EMPTY_SET, Residency};
use crate::kv::index::pages::{BlockId, CHUNK, locate};
use crate::kv::index::shared::Shared;
use crate::kv::index::types::{CopyReport, NewBlock};

impl Writer {
    /// Adds the tree to the owners of a page's blocks, from `block` on, as long as the blocks have these
    /// paths and names and the same owners, and the tree is not among them and knows nothing else by the names. Returns
    /// how many.
    #[inline]
    pub(super) fn add_owner_to_run(
        &mut self,
        shared: &Shared,
        tree: &TreeState,
        store: StoreContext,
        block: BlockId,
        paths: &[u64],
        blocks: &[NewBlock],
    ) -> usize {
        let (page, first) = locate(block);
        let (head, body) = shared.pages.get(page);
        let old = body.owners[first].load(Relaxed);
        if old == EMPTY_SET
            || self.sets.residency(&shared.sets, old, store.slot) != Residency::Absent
        {
            return 0;
        }
        let chunk = self.chunk(page);
        let run = paths
            .iter()
            .zip(blocks)
            .zip(first..head.len())
            .take_while(|((path, block), offset)| {
                body.paths[*offset].load(Relaxed) == **path
                    && body.owners[*offset].load(Relaxed) == old
                    && chunk.has_name(page, *offset, block.name.0)
                    && tree.alias(block.name).is_none()
            })
            .count();
        if run == 0 {
            return 0;
        }
        let new = self
            .sets
            .with_residency(&shared.sets, old, store.slot, store.residency);
        self.sets.retain(new, run as u32);
        for owners in &body.owners[first..first + run] {
            owners.store(new, Release);
        }
        self.sets.release(&shared.sets, old, run as u32);
        self.memberships += run as u64;
        run
    }

    /// Adds one copy of a block to the tree. Returns whether the tree did not own it before.
    #[inline]
    pub(super) fn add_owner(
        &mut self,
        shared: &Shared,
        tree: &mut TreeState,
        store: StoreContext,
        block: BlockId,
    ) -> bool {
        let residency = self.residency(shared, store.slot, block);
        if residency == Residency::Absent {
            self.set_residency(shared, store.slot, block, store.residency);
            self.memberships += 1;
            tree.count_first_copies(store, block);
            return true;
        }
        let old = tree.copies(block, residency);
        let mut new = old;
        let copies = &mut new[store.tier as usize];
        *copies = match (store.copies, *copies) {
            (CopyReport::OneMore, count) => count.saturating_add(1),
            (CopyReport::AtLeastOne, 0) => UNKNOWN,
            (CopyReport::AtLeastOne, count) => count,
        };
        tree.set_copies(block, old, new);
        self.set_residency(shared, store.slot, block, residency_of(new));
        false
    }

    /// Gives a block of the tree a name; `is_new` if the tree did not own the block before.
    ///
    /// A tree knows a block by one name, and one block by a name. So another block with this name is
    /// forgotten, and of a block reported under a second name only the tier of that report counts, until its first
    /// removal: removals of the other copies may use the name that is no longer known. All this makes
    /// the tree colder than the engine's cache, never warmer.
    #[inline(never)]
    pub(super) fn set_name(
        &mut self,
        shared: &Shared,
        tree: &mut TreeState,
        store: StoreContext,
        block: BlockId,
        name: EngineHash,
        is_new: bool,
    ) {
        let slot = store.slot;
        if let Some(other) = self.resolve(shared, tree, slot, name)
            && other != block
        {
            self.forget(shared, tree, slot, other);
        }
        let (page, offset) = locate(block);
        let is_table_name = self.has_name(block, name);
        if !is_new {
            if self.is_known_as(tree, block, name) {
                return;
            }
            let residency = self.residency(shared, slot, block);
            let old = tree.copies(block, residency);
            let mut new = [0; Tier::COUNT];
            // One copy is that of this store, which was just counted; more include some under the other name.
            new[store.tier as usize] = match old[store.tier as usize] {
                1 => 1,
                _ => UNKNOWN,
            };
            tree.set_copies(block, old, new);
            self.set_residency(shared, slot, block, residency_of(new));
        }
        tree.drop_alias(block);
        if !is_table_name {
            let is_named = self.meta(page).named >> offset & 1 == 1;
            if is_named || self.insert_name(block, name) != Insert::Done {
                tree.set_alias(block, name);
            }
        }
    }

    /// Whether the tree, which owns the block, knows it by this name.
    #[inline]
    pub(super) fn is_known_as(&self, tree: &TreeState, block: BlockId, name: EngineHash) -> bool {
        match tree.alias_of(block) {
            Some(alias) => alias == name,
            None => self.has_name(block, name),
        }
    }

    /// Gives a block a name in the name table.
    #[inline]
    pub(super) fn insert_name(&mut self, block: BlockId, name: EngineHash) -> Insert {
        let chunks = &self.chunks;
        let outcome = self.names.insert(name.0, block, |block| {
            let (page, offset) = locate(block);
            chunks[page as usize / CHUNK].has_name(page, offset, name.0)
        });
        if outcome == Insert::Done {
            let (page, offset) = locate(block);
            let chunk = &mut self.chunks[page as usize / CHUNK];
            chunk.rows[page as usize % CHUNK].names[offset] = name.0;
            chunk.rows[page as usize % CHUNK].meta.named |= 1 << offset;
        }
        outcome
    }
}
