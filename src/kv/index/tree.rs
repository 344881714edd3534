//! The handle of one dp rank's blocks in an index. The slot and the path hashes in the index together
//! *are* the rank's radix tree: no nodes or links are stored. Dropping the handle removes the rank's
//! blocks. A tree judges neither the order nor the identity of events; [`crate::kv::stream`] does.

use std::sync::Arc;

use parking_lot::RwLock;

use super::pages::{Pages, Slot};
use super::prefix_index::PrefixIndex;
use super::types::{CopyReport, NewBlock, Parent, TreeBlock, UnknownParent};
use super::writer::Writer;
use super::writer::list::Listing;
use super::writer::store::Report;
use crate::ids::WorkerId;
use crate::kv::event::{EngineHash, Tier};

#[derive(Debug)]
pub struct Tree {
    index: Arc<PrefixIndex>,
    /// None if the index was full: the tree stays empty.
    slot: Option<Slot>,
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
        let report = Report { tier, copies };
        let stored = self.write(Err(UnknownParent), |writer, pages, slot| {
            writer.store(pages, slot, parent, blocks, report)
        });
        stored.map(|_| ())
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
        let report = Report { tier, copies };
        self.write(blocks.len(), |writer, pages, slot| {
            writer.store_lower(pages, slot, parent, blocks, report)
        })
    }

    /// Adds one copy of each block that the tree knows by its name. Returns how many it does not know.
    pub fn add_copies(&mut self, names: &[EngineHash], tier: Tier, copies: CopyReport) -> usize {
        let report = Report { tier, copies };
        self.write(names.len(), |writer, pages, slot| {
            writer.add_copies(pages, slot, names.iter().copied(), report)
        })
    }

    /// Whether a copy can be removed, now or later: an unknown number of copies counts as one from now on.
    pub fn count_copy_to_remove(&mut self, name: EngineHash, tier: Tier) -> bool {
        self.write(false, |writer, pages, slot| {
            writer.count_copy_to_remove(pages, slot, name, tier)
        })
    }

    /// How many copies the tree counts of a block; an unknown number counts as one.
    pub fn copies(&self, name: EngineHash, tier: Tier) -> u32 {
        self.read(0, |writer, pages, slot| {
            writer.copies_of(pages, slot, name, tier)
        })
    }

    /// Removes one copy of each block. Returns how many of them had no copy in that tier.
    pub fn remove(&mut self, names: &[EngineHash], tier: Tier) -> usize {
        self.write(names.len(), |writer, pages, slot| {
            writer.remove(pages, slot, names, tier)
        })
    }

    pub fn clear(&mut self) {
        self.write((), |writer, pages, slot| writer.clear(pages, slot));
    }

    /// Whether lookups see the tree. At first they do not.
    pub fn set_visible(&mut self, is_visible: bool) {
        if let Some(slot) = self.slot {
            self.index.set_visible(slot, is_visible);
        }
    }

    pub fn blocks(&self) -> [u64; Tier::COUNT] {
        self.read([0; Tier::COUNT], |writer, _, slot| writer.tree(slot).blocks)
    }

    /// Blocks in any tier.
    pub fn len(&self) -> u64 {
        self.read(0, |writer, _, slot| writer.tree(slot).len)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The tree's share of the index's memory, by its share of all memberships.
    pub fn memory_bytes(&self) -> usize {
        self.read(0, |writer, pages, slot| {
            let share = writer.bytes(pages) as u64 * writer.tree(slot).len;
            (share / writer.memberships.max(1)) as usize
        })
    }

    /// All blocks as they are now, parents before children.
    pub fn list(&self) -> Vec<TreeBlock> {
        self.read(Vec::new(), |writer, pages, slot| {
            let mut listing = Listing::default();
            for page in writer.pages_of(slot) {
                writer.list_page(pages, slot, page, &mut listing);
            }
            listing.finish()
        })
    }

    /// Whether the memory limit took blocks from the tree since this was last asked.
    pub fn take_evicted(&mut self) -> bool {
        self.write(false, |writer, _, slot| {
            std::mem::take(&mut writer.tree_mut(slot).was_evicted)
        })
    }

    /// Reads the tree; `otherwise` if it has no slot.
    pub(super) fn read<T>(&self, otherwise: T, read: impl FnOnce(&Writer, &Pages, Slot) -> T) -> T {
        match self.slot {
            Some(slot) => self.index.read(|writer, pages| read(writer, pages, slot)),
            None => otherwise,
        }
    }

    /// Changes the tree; `otherwise` if it has no slot.
    fn write<T>(
        &mut self,
        otherwise: T,
        write: impl FnOnce(&mut Writer, &RwLock<Pages>, Slot) -> T,
    ) -> T {
        match self.slot {
            Some(slot) => self.index.write(|writer, pages| write(writer, pages, slot)),
            None => otherwise,
        }
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        self.index.remove_slot(self.slot);
    }
}
