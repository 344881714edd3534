//! Removes blocks from a tree: one copy of each named block, or all.

use parking_lot::{RwLock, RwLockWriteGuard};
use smallvec::SmallVec;

use super::tree_state::{TreeState, UNKNOWN};
use super::{PIECE, Writer, hash_of};
use crate::kv::block::SEGMENT_BLOCKS;
use crate::kv::event::{EngineHash, Tier};
use crate::kv::index::pages::{BlockId, Pages, Slot};

impl Writer {
    /// Removes one copy of each block. Returns for how many names the tree had none in that tier.
    pub(in crate::kv::index) fn remove(
        &mut self,
        lock: &RwLock<Pages>,
        slot: Slot,
        names: &[EngineHash],
        tier: Tier,
    ) -> usize {
        let mut missing = 0;
        for piece in names.chunks(PIECE) {
            // Looking for all of them first makes the processor wait for several cache lines at the same time.
            let pages = lock.read();
            let block_of = |name: &EngineHash| (*name, self.find_name(&pages, *name));
            let found: SmallVec<[_; PIECE]> = piece.iter().map(block_of).collect();
            drop(pages);
            let mut pages = lock.write();
            missing += self.change(slot, |writer, tree| {
                let mut missing = 0;
                let mut left = &found[..];
                while let [(name, _), rest @ ..] = left {
                    let removed = writer.remove_run(&mut pages, tree, left, tier);
                    left = &left[removed..];
                    if removed == 0 {
                        let is_removed = writer.remove_copy(&mut pages, tree, *name, tier);
                        missing += usize::from(!is_removed);
                        left = rest;
                    }
                }
                missing
            });
            RwLockWriteGuard::unlock_fair(pages);
        }
        self.change(slot, |_, tree| tree.shrink());
        self.shrink(lock);
        missing
    }

    /// Removes the only copies of the first blocks, as far as they are in one page that only this tree has. Returns how
    /// many.
    fn remove_run(
        &mut self,
        pages: &mut Pages,
        tree: &mut TreeState,
        found: &[(EngineHash, Option<BlockId>)],
        tier: Tier,
    ) -> usize {
        let mut of_run = None;
        let mut run = 0;
        for (name, block) in found {
            // A name that comes twice may have removed the page.
            let Some(block) = *block else { break };
            let Some(page) = pages.find(block.page()) else {
                break;
            };
            let is_sole = matches!(page.owners[..], [owner] if owner.slot == tree.slot
                && owner.tiers[tier as usize] & block.bit() != 0);
            let is_plain = tree.is_plain(block) && tree.alias(*name).is_none();
            if !is_sole || !is_plain || *of_run.get_or_insert(block.page()) != block.page() {
                break;
            }
            let Ok(entry) = self
                .names
                .find_entry(hash_of(*name), |known| *known == block)
            else {
                break;
            };
            entry.remove();
            run |= block.bit();
            pages.get_mut(block.page()).take_name(block.offset());
        }
        let count = run.count_ones();
        if let Some(page) = of_run.filter(|_| count > 0) {
            tree.blocks[tier as usize] -= u64::from(count);
            self.remove_owner(pages, tree, page, run);
        }
        count as usize
    }

    /// Returns false if the tree has no copy in that tier.
    fn remove_copy(
        &mut self,
        pages: &mut Pages,
        tree: &mut TreeState,
        name: EngineHash,
        tier: Tier,
    ) -> bool {
        let Some(block) = self.resolve(pages, tree, name) else {
            return false;
        };
        let mut copies = self.copies(pages, tree, block);
        let of_tier = &mut copies[tier as usize];
        *of_tier = match *of_tier {
            0 => return false,
            UNKNOWN => 0,
            count => count - 1,
        };
        self.set_copies(pages, tree, block, copies);
        true
    }

    /// Whether the tree has a copy of a block in a tier, so that one can be removed. An unknown number of copies
    /// counts as one from now on, as it does at a removal.
    pub(in crate::kv::index) fn count_copy_to_remove(
        &mut self,
        lock: &RwLock<Pages>,
        slot: Slot,
        name: EngineHash,
        tier: Tier,
    ) -> bool {
        let pages = &mut *lock.write();
        self.change(slot, |writer, tree| {
            let Some(block) = writer.resolve(pages, tree, name) else {
                return false;
            };
            let mut copies = writer.copies(pages, tree, block);
            if copies[tier as usize] == UNKNOWN {
                copies[tier as usize] = 1;
                writer.set_copies(pages, tree, block, copies);
            }
            copies[tier as usize] > 0
        })
    }

    /// How many copies of a block the tree has in a tier; an unknown number counts as one.
    pub(in crate::kv::index) fn copies_of(
        &self,
        pages: &Pages,
        slot: Slot,
        name: EngineHash,
        tier: Tier,
    ) -> u32 {
        let tree = self.tree(slot);
        let block = self.resolve(pages, tree, name);
        let copies = block.map(|block| self.copies(pages, tree, block)[tier as usize]);
        match copies {
            Some(UNKNOWN) => 1,
            copies => copies.unwrap_or(0).into(),
        }
    }

    pub(in crate::kv::index) fn clear(&mut self, lock: &RwLock<Pages>, slot: Slot) {
        for piece in self.pages_of(slot).chunks(PIECE / SEGMENT_BLOCKS) {
            let mut pages = lock.write();
            self.change(slot, |writer, tree| {
                for page in piece {
                    writer.forget_in_page(&mut pages, tree, *page);
                }
            });
            RwLockWriteGuard::unlock_fair(pages);
        }
        self.change(slot, |_, tree| tree.shrink());
        self.shrink(lock);
    }
}
