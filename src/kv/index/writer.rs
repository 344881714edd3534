//! Changes an index. Beside the pages, which lookups read, the writer knows every block's name and every tree's copies.
//! This file has its state and the steps that storing, removing and evicting share.
//!
//! The writer has the lock of the pages for a few blocks or owners at a time, so that lookups wait for microseconds,
//! and hands it to those that wait. What takes longer (looking for old pages, another size of a large table) only reads
//! the pages: lookups go on, and events of all ranks wait. The longest wait is for all names, when their table doubles.

mod evict;
pub(super) mod list;
mod remove;
pub(super) mod store;
mod tree_state;

use std::hash::BuildHasher;
use std::sync::Arc;

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use parking_lot::RwLock;
use rustc_hash::FxBuildHasher;

use self::tree_state::{Copies, TreeState, residency_of};
use super::budget::{MemoryAccount, MemoryBudget};
use super::pages::{BlockId, PageId, Pages, RankOfSlot, ResizedStarts, Slot};
use crate::ids::WorkerId;
use crate::kv::block::SEGMENT_BLOCKS;
use crate::kv::event::{EngineHash, Tier};

/// Names whose blocks are changed with the lock held. A longer event is applied in several pieces.
const PIECE: usize = 64;

/// Trees of one index. Each may be an owner of a page, and lookups read all of its owners.
pub(super) const MAX_TREES: usize = 24_000;

#[derive(Debug)]
pub(super) struct Writer {
    /// Blocks by the name that a tree first gave them. The pages have the names.
    names: HashTable<BlockId>,
    /// By slot.
    trees: Vec<Option<Box<TreeState>>>,
    free_slots: Vec<Slot>,
    /// By page, the writer's clock when a block of it was stored last. Before an eviction also: when one that continues
    /// the page's chain was.
    stored_at: Vec<u64>,
    memory: MemoryAccount,
    /// Blocks that any tree owns.
    pub(super) blocks: u64,
    /// Blocks, counted once for each tree that owns them.
    pub(super) memberships: u64,
    /// Counts stores, to tell which pages were stored longest ago.
    clock: u64,
    /// The clock at the last eviction.
    evicted_at: u64,
    trees_bytes: usize,
    /// Blocks dropped for the memory limit since the caller took this count.
    pub(super) dropped_blocks: u64,
}

#[inline]
fn hash_of(name: EngineHash) -> u64 {
    FxBuildHasher.hash_one(name)
}

/// The hash of the name that a block has in the table.
fn hash_of_block(pages: &Pages, block: BlockId) -> u64 {
    let name = pages.get(block.page()).name(block.offset());
    hash_of(name.unwrap_or(EngineHash(0)))
}

/// The offsets of some blocks of a page (a bit each).
fn offsets_of(blocks: u16) -> impl Iterator<Item = usize> {
    (0..SEGMENT_BLOCKS).filter(move |offset| blocks >> offset & 1 == 1)
}

/// Replaces tables of pages. Lookups wait neither for the new ones nor until the old ones are freed.
fn resize_starts(lock: &RwLock<Pages>, mut resized: ResizedStarts) {
    if resized.iter().any(Option::is_some) {
        lock.write().swap_starts(&mut resized);
    }
}

impl Writer {
    pub(super) fn new(budget: Arc<MemoryBudget>) -> Self {
        Self {
            names: HashTable::new(),
            trees: Vec::new(),
            free_slots: Vec::new(),
            stored_at: Vec::new(),
            memory: MemoryAccount::new(budget),
            blocks: 0,
            memberships: 0,
            clock: 0,
            evicted_at: 0,
            trees_bytes: 0,
            dropped_blocks: 0,
        }
    }

    /// A slot for a new tree, invisible to lookups. None if there are as many trees as an index takes.
    pub(super) fn add_tree(
        &mut self,
        pages: &mut Pages,
        worker: WorkerId,
        rank: u32,
    ) -> Option<Slot> {
        let slot = match self.free_slots.pop() {
            Some(slot) => slot,
            None if self.trees.len() < MAX_TREES => {
                self.trees.push(None);
                pages.slots.push(None);
                self.trees.len() as Slot - 1
            }
            None => return None,
        };
        self.trees[slot as usize] = Some(Box::new(TreeState::new(slot)));
        self.change(slot, |_, _| {});
        pages.slots[slot as usize] = Some(RankOfSlot {
            worker,
            rank,
            is_visible: false,
        });
        Some(slot)
    }

    /// Removes a tree and all its blocks; then its slot is free.
    pub(super) fn remove_tree(&mut self, lock: &RwLock<Pages>, slot: Slot) {
        self.clear(lock, slot);
        lock.write().slots[slot as usize] = None;
        if let Some(tree) = self.trees[slot as usize].take() {
            self.trees_bytes -= tree.counted_bytes;
        }
        self.free_slots.push(slot);
    }

    pub(super) fn tree(&self, slot: Slot) -> &TreeState {
        let tree = self.trees[slot as usize].as_deref();
        tree.expect("its handle has the slot")
    }

    pub(super) fn tree_mut(&mut self, slot: Slot) -> &mut TreeState {
        let tree = self.trees[slot as usize].as_deref_mut();
        tree.expect("its handle has the slot")
    }

    /// Changes a tree, whose state is out of the writer meanwhile.
    fn change<T>(&mut self, slot: Slot, change: impl FnOnce(&mut Self, &mut TreeState) -> T) -> T {
        let tree = self.trees[slot as usize].take();
        let mut tree = tree.expect("its handle has the slot");
        let result = change(self, &mut tree);
        let bytes = tree.bytes();
        self.trees_bytes = self.trees_bytes + bytes - tree.counted_bytes;
        tree.counted_bytes = bytes;
        self.trees[slot as usize] = Some(tree);
        result
    }

    pub(super) fn bytes(&self, pages: &Pages) -> usize {
        pages.bytes()
            + self.names.allocation_size()
            + self.trees_bytes
            + self.stored_at.capacity() * size_of::<u64>()
            + self.trees.capacity() * size_of::<Option<Box<TreeState>>>()
            + self.free_slots.capacity() * size_of::<Slot>()
    }

    /// What `bytes` returns, counted by a walk over all pages and trees.
    #[cfg(test)]
    pub(super) fn recount(&self, pages: &Pages) -> usize {
        let trees = self.trees.iter().flatten().map(|tree| tree.bytes());
        self.bytes(pages) - self.trees_bytes - pages.bytes()
            + trees.sum::<usize>()
            + pages.recount()
    }

    /// Charges the memory budget with what the index takes now.
    pub(super) fn charge(&self, pages: &Pages) {
        self.memory.charge(self.bytes(pages));
    }

    #[inline]
    fn find_name(&self, pages: &Pages, name: EngineHash) -> Option<BlockId> {
        let has_name = |block: &BlockId| pages.has_name(*block, name);
        self.names.find(hash_of(name), has_name).copied()
    }

    #[inline]
    fn entry(&mut self, pages: &Pages, name: EngineHash) -> Entry<'_, BlockId> {
        let has_name = |block: &BlockId| pages.has_name(*block, name);
        let of_block = |block: &BlockId| hash_of_block(pages, *block);
        self.names.entry(hash_of(name), has_name, of_block)
    }

    #[inline]
    fn resolve(&self, pages: &Pages, tree: &TreeState, name: EngineHash) -> Option<BlockId> {
        let in_table = || self.find_name(pages, name);
        Self::resolve_with(pages, tree, name, in_table)
    }

    /// The block that a tree knows by this name. `in_table` says which block the table of names has for it.
    #[inline]
    fn resolve_with(
        pages: &Pages,
        tree: &TreeState,
        name: EngineHash,
        in_table: impl FnOnce() -> Option<BlockId>,
    ) -> Option<BlockId> {
        if let Some(block) = tree.alias(name) {
            return Some(block);
        }
        let block = in_table()?;
        let page = pages.get(block.page());
        let is_owner = page.residency(tree.slot, block.offset()).is_some();
        (is_owner && tree.alias_of(block).is_none()).then_some(block)
    }

    #[inline]
    fn copies(&self, pages: &Pages, tree: &TreeState, block: BlockId) -> Copies {
        let page = pages.get(block.page());
        tree.copies(block, page.residency(tree.slot, block.offset()))
    }

    fn set_copies(&mut self, pages: &mut Pages, tree: &mut TreeState, block: BlockId, new: Copies) {
        let page = pages.get(block.page());
        let (before, after) = (page.residency(tree.slot, block.offset()), residency_of(new));
        tree.set_copies(block, tree.copies(block, before), new);
        match (before, after) {
            (None, Some(tier)) => self.add_owner(pages, tree, block.page(), block.bit(), tier),
            (Some(_), None) => self.remove_owner(pages, tree, block.page(), block.bit()),
            (Some(_), Some(_)) => {
                pages.set_residency(tree.slot, block.page(), block.bit(), after);
            }
            (None, None) => {}
        }
    }

    /// Makes a tree own some blocks of a page (a bit each) that it does not own. Their copies are counted by the
    /// caller.
    fn add_owner(
        &mut self,
        pages: &mut Pages,
        tree: &mut TreeState,
        page: PageId,
        blocks: u16,
        tier: Tier,
    ) {
        let unowned = blocks & !pages.get(page).owned;
        self.blocks += u64::from(unowned.count_ones());
        self.memberships += u64::from(blocks.count_ones());
        tree.len += u64::from(blocks.count_ones());
        if pages.set_residency(tree.slot, page, blocks, Some(tier)) {
            tree.pages.insert(page);
        }
    }

    /// Makes a tree own some of its blocks in a page (a bit each) no more. Their copies are counted by the caller. A
    /// block loses its name with its last owner, and the page is removed with its last block.
    fn remove_owner(&mut self, pages: &mut Pages, tree: &mut TreeState, page: PageId, blocks: u16) {
        self.memberships -= u64::from(blocks.count_ones());
        tree.len -= u64::from(blocks.count_ones());
        if pages.set_residency(tree.slot, page, blocks, None) {
            tree.pages.remove(&page);
        }
        let of_page = pages.get_mut(page);
        let unowned = blocks & !of_page.owned;
        self.blocks -= u64::from(unowned.count_ones());
        for offset in offsets_of(blocks) {
            tree.drop_alias(BlockId::new(page, offset));
            if unowned >> offset & 1 == 1
                && let Some(name) = of_page.take_name(offset)
            {
                let is_it = |known: &BlockId| *known == BlockId::new(page, offset);
                if let Ok(entry) = self.names.find_entry(hash_of(name), is_it) {
                    entry.remove();
                }
            }
        }
        pages.remove_if_empty(page);
    }

    /// Removes all copies of a tree's blocks in a page. Returns how many blocks.
    fn forget_in_page(&mut self, pages: &mut Pages, tree: &mut TreeState, page: PageId) -> u32 {
        let owner = pages.get(page).owner(tree.slot);
        let blocks = owner.map_or(0, |owner| owner.blocks());
        for offset in offsets_of(blocks) {
            let block = BlockId::new(page, offset);
            let copies = self.copies(pages, tree, block);
            tree.set_copies(block, copies, [0; Tier::COUNT]);
        }
        if blocks != 0 {
            self.remove_owner(pages, tree, page, blocks);
        }
        blocks.count_ones()
    }

    /// Gives memory back of tables that are nearly empty. The lists by a page's number (of the pages and of free
    /// numbers in [`Pages`], and `stored_at`) stay as long as they once were while any block is left, because a page
    /// keeps the number by which names and trees know it. They take a small part of what the pages took, which the
    /// memory limit bounded; they count in it; and new pages get the free numbers first.
    fn shrink(&mut self, lock: &RwLock<Pages>) {
        if self.names.capacity() > 64 + self.names.len() * 4 {
            let pages = lock.read();
            let of_block = |block: &BlockId| hash_of_block(&pages, *block);
            self.names.shrink_to(self.names.len() * 2, of_block);
        }
        let smaller = lock.read().smaller_starts();
        resize_starts(lock, smaller);
        if self.blocks == 0 && !self.stored_at.is_empty() {
            self.stored_at = Vec::new();
            // They are freed with the lock free.
            let _unused = lock.write().take_unused();
        }
    }
}
