//! The handle of one dp rank's blocks in an index. The slot and the path hashes in the index together
//! *are* the rank's radix tree: no nodes or links are stored. Dropping the handle removes the rank's
//! blocks. A tree judges neither the order nor the identity of events; [`crate::kv::stream`] does.

use std::sync::Arc;

use super::owner_sets::Slot;
use super::prefix_index::PrefixIndex;
use super::types::{CopyReport, NewBlock, Parent, TreeBlock, UnknownParent};
use super::writer::list::Listing;
use crate::ids::WorkerId;
use crate::kv::event::{EngineHash, Tier};

#[derive(Debug)]
pub struct Tree {
    index: Arc<PrefixIndex>,
    slot: Slot,
}

impl PrefixIndex {
    /// Adds an empty tree for one dp rank of a worker. Lookups do not see it yet.
    pub fn add_tree(self: &Arc<Self>, worker: WorkerId, rank: u32) -> Tree {
        Tree {
            index: self.clone(),
            slot: self.add_slot(worker, rank),
        }
    }
}

impl Tree {
    /// Adds one copy of each block, in order. A tree knows a block by one name, and one block by a
    /// name: the block that a name stood for before is forgotten.
    pub fn store(
        &mut self,
        parent: Parent,
        blocks: &[NewBlock],
        tier: Tier,
        copies: CopyReport,
    ) -> Result<(), UnknownParent> {
        let slot = self.slot;
        self.index
            .write(|writer, shared| writer.store(shared, slot, parent, blocks, tier, copies))
    }

    /// Adds one copy of each block in a tier below the GPU's: of a block that the tree knows by its name, whatever the
    /// event says of its place. Blocks that it does not know are placed as in [`Tree::store`]. Returns how many could
    /// not be placed, or are in the GPU under another name.
    pub fn store_lower(
        &mut self,
        parent: Parent,
        blocks: &[NewBlock],
        tier: Tier,
        copies: CopyReport,
    ) -> usize {
        let slot = self.slot;
        self.index
            .write(|writer, shared| writer.store_lower(shared, slot, parent, blocks, tier, copies))
    }

    /// Adds one copy of each block that the tree knows by its name. Returns how many it does not know.
    pub fn add_copies(&mut self, names: &[EngineHash], tier: Tier, copies: CopyReport) -> usize {
        let slot = self.slot;
        let names = names.iter().copied();
        self.index
            .write(|writer, shared| writer.add_copies(shared, slot, names, tier, copies))
    }

    /// Whether a copy can be removed, now or later: an unknown number of copies counts as one from now on.
    pub fn count_copy_to_remove(&mut self, name: EngineHash, tier: Tier) -> bool {
        let slot = self.slot;
        self.index
            .write(|writer, shared| writer.count_copy_to_remove(shared, slot, name, tier))
    }

    /// How many copies the tree counts of a block; an unknown number counts as one.
    pub fn copies(&self, name: EngineHash, tier: Tier) -> u32 {
        self.index
            .read(|writer, shared| writer.copies_of(shared, self.slot, name, tier))
    }

    /// Removes one copy of each block. Returns how many of them had no copy in that tier.
    pub fn remove(&mut self, names: &[EngineHash], tier: Tier) -> usize {
        let slot = self.slot;
        self.index
            .write(|writer, shared| writer.remove(shared, slot, names, tier))
    }

    /// Forgets all blocks.
    pub fn clear(&mut self) {
        let slot = self.slot;
        self.index
            .write(|writer, shared| writer.clear(shared, slot));
    }

    /// Whether lookups see the tree. At first they do not.
    pub fn set_visible(&mut self, is_visible: bool) {
        let slot = self.slot;
        self.index
            .read(|_, shared| shared.slots.set_visible(slot, is_visible));
    }

    pub(super) fn index(&self) -> &PrefixIndex {
        &self.index
    }

    pub(super) fn slot(&self) -> Slot {
        self.slot
    }

    /// Blocks in each tier.
    pub fn blocks(&self) -> [u64; Tier::COUNT] {
        self.index.read(|writer, _| {
            writer
                .tree(self.slot)
                .map_or([0; Tier::COUNT], |tree| tree.blocks)
        })
    }

    /// Blocks in any tier.
    pub fn len(&self) -> u64 {
        self.index
            .read(|writer, _| writer.tree(self.slot).map_or(0, |tree| tree.len))
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The tree's share of the index's memory, by its share of all memberships.
    pub fn memory_bytes(&self) -> usize {
        self.index.read(|writer, _| {
            let share = |len| writer.bytes() as u64 * len / writer.memberships.max(1);
            writer
                .tree(self.slot)
                .map_or(0, |tree| share(tree.len) as usize)
        })
    }

    /// All blocks as they are now, parents before children.
    pub fn list(&self) -> Vec<TreeBlock> {
        self.index.read(|writer, shared| {
            let mut listing = Listing::default();
            for page in writer.pages_of(self.slot) {
                writer.list_page(shared, self.slot, page, &mut listing);
            }
            listing.finish()
        })
    }

    /// Whether the memory limit took blocks from the tree since this was last asked.
    pub fn take_evicted(&mut self) -> bool {
        let mut writer = self.index.writer();
        let tree = writer.tree_mut(self.slot);
        tree.is_some_and(|tree| std::mem::take(&mut tree.was_evicted))
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        self.index.remove_slot(self.slot);
    }
}
