//! Changes an index, behind its lock: beside what lookups read, the writer knows every block's name
//! and every tree's copies. This file has its state and the steps that storing, removing and evicting
//! share.

mod add_owner;
mod copies;
mod copies_of_known;
mod copy;
mod evict;
mod fork_filter;
pub(super) mod list;
mod page_alloc;
mod page_rows;
mod place;
#[cfg(test)]
mod recount;
mod remove;
mod store;
mod tree_state;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};

use self::fork_filter::ForkFilter;
use self::page_rows::{PageMeta, RowChunk};
use self::tree_state::TreeState;
use super::interner::SetInterner;
use super::name_table::{NameHash, NameTable};
use super::owner_sets::{EMPTY_SET, MAX_TREES, Residency, Slot};
use super::page_table::PageTable;
use super::pages::{BlockId, CHUNK, PageId, Pages, block_id, locate};
use super::shared::Shared;
use super::simd::prefetch;
use crate::ids::WorkerId;
use crate::kv::block::SEGMENT_BLOCKS;
use crate::kv::event::EngineHash;

#[derive(Debug)]
pub(super) struct Writer {
    chunks: Vec<RowChunk>,
    names: NameTable,
    /// Pages that start a segment, and pages that start within one.
    starts: Directory,
    forks: Directory,
    fork_filter: ForkFilter,
    free: Vec<PageId>,
    /// Pages from here on were never used.
    first_unused: PageId,
    sets: SetInterner,
    trees: Vec<Option<Box<TreeState>>>,
    free_slots: BTreeSet<Slot>,
    /// Scratch space: the path hashes of the blocks that are placed, and the hashes of their names.
    paths: Vec<u64>,
    name_hashes: Vec<NameHash>,
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
    /// Copies in a lower tier that were not counted, because the GPU has their blocks under other names, since the
    /// caller took this count.
    misnamed: usize,
}

/// A page table as the writer has it; lookups have the same one.
#[derive(Debug)]
struct Directory {
    table: Arc<PageTable>,
    len: usize,
}

impl Writer {
    pub(super) fn new(shared: &Shared) -> Self {
        let directory = |table| Directory { table, len: 0 };
        Self {
            chunks: Vec::new(),
            names: NameTable::new(),
            starts: directory(shared.starts.load_full()),
            forks: directory(shared.forks.load_full()),
            fork_filter: ForkFilter::new(),
            free: Vec::new(),
            first_unused: 0,
            sets: SetInterner::new(),
            trees: Vec::new(),
            free_slots: BTreeSet::new(),
            paths: Vec::new(),
            name_hashes: Vec::new(),
            blocks: 0,
            memberships: 0,
            clock: 0,
            evicted_at: 0,
            trees_bytes: 0,
            dropped_blocks: 0,
            misnamed: 0,
        }
    }

    /// None if there are as many trees as an owner set has room for.
    pub(super) fn add_tree(
        &mut self,
        shared: &Shared,
        worker: WorkerId,
        rank: u32,
    ) -> Option<Slot> {
        let slot = match self.free_slots.pop_first() {
            Some(slot) => slot,
            None if self.trees.len() < MAX_TREES => {
                self.trees.push(None);
                self.trees.len() as Slot - 1
            }
            None => return None,
        };
        self.trees[slot as usize] = Some(Box::default());
        shared.slots.add(slot, worker, rank);
        Some(slot)
    }

    /// Removes a tree and all its blocks; then its slot is free.
    pub(super) fn remove_tree(&mut self, shared: &Shared, slot: Slot) {
        self.clear(shared, slot);
        shared.slots.remove(slot);
        if let Some(tree) = self.trees[slot as usize].take() {
            self.trees_bytes -= tree.counted_bytes;
        }
        self.free_slots.insert(slot);
    }

    pub(super) fn tree(&self, slot: Slot) -> Option<&TreeState> {
        self.trees.get(slot as usize)?.as_deref()
    }

    pub(super) fn tree_mut(&mut self, slot: Slot) -> Option<&mut TreeState> {
        self.trees.get_mut(slot as usize)?.as_deref_mut()
    }

    /// A tree's state, taken out while the writer changes the tree; to be put back.
    fn take_tree(&mut self, slot: Slot) -> Option<Box<TreeState>> {
        self.trees.get_mut(slot as usize)?.take()
    }

    /// All memory that is allocated.
    pub(super) fn bytes(&self) -> usize {
        self.side_bytes() + self.names.bytes() + self.page_bytes()
    }

    /// What counts for the memory limit. Everything that grows with the blocks counts as if all pages
    /// were full: they may become so, and pages are not given back.
    pub(super) fn limited_bytes(&self) -> usize {
        let chunks = self.chunks.len();
        self.side_bytes().max(chunks * SIDE_BYTES)
            + self.names.bytes().max(chunks * NAMES_BYTES)
            + self.page_bytes()
    }

    fn side_bytes(&self) -> usize {
        self.trees_bytes
            + self.sets.bytes()
            + self.starts.table.bytes()
            + self.forks.table.bytes()
            + (self.free.capacity() + self.trees.capacity() * 2) * 4
            + self.paths.capacity() * 8
            + ForkFilter::BYTES
    }

    pub(super) fn page_bytes(&self) -> usize {
        self.chunks.len() * (CHUNK * Pages::BYTES + RowChunk::BYTES)
    }

    #[inline]
    fn meta(&self, page: PageId) -> &PageMeta {
        &self.chunks[page as usize / CHUNK].rows[page as usize % CHUNK].meta
    }

    #[inline]
    fn meta_mut(&mut self, page: PageId) -> &mut PageMeta {
        &mut self.chunks[page as usize / CHUNK].rows[page as usize % CHUNK].meta
    }

    #[inline]
    fn chunk(&self, page: PageId) -> &RowChunk {
        &self.chunks[page as usize / CHUNK]
    }

    /// Whether the name table has this name for a block.
    #[inline]
    fn has_name(&self, block: BlockId, name: EngineHash) -> bool {
        let (page, offset) = locate(block);
        self.chunk(page).has_name(page, offset, name.0)
    }

    /// Asks at once for all cache lines that are read of a block, or written after it.
    #[inline]
    fn prefetch_block(&self, shared: &Shared, block: BlockId) {
        let (page, offset) = locate(block);
        let (head, body) = shared.pages.get(page);
        let row = &self.chunk(page).rows[page as usize % CHUNK];
        prefetch(head);
        prefetch(&body.paths[offset]);
        prefetch(&body.owners);
        prefetch(&row.meta);
        prefetch(&row.names[offset]);
    }

    /// The block that a tree knows by this name.
    #[inline]
    fn resolve(
        &self,
        shared: &Shared,
        tree: &TreeState,
        slot: Slot,
        name: EngineHash,
    ) -> Option<BlockId> {
        if let Some(block) = tree.alias(name) {
            return Some(block);
        }
        let block = self.names.find(name.0, |block| {
            let (page, offset) = locate(block);
            self.prefetch_block(shared, block);
            self.chunk(page).has_name(page, offset, name.0)
        })?;
        self.owns_by_table_name(shared, tree, slot, block)
            .then_some(block)
    }

    /// Whether a tree owns a block, and knows it by its name in the name table.
    #[inline]
    fn owns_by_table_name(
        &self,
        shared: &Shared,
        tree: &TreeState,
        slot: Slot,
        block: BlockId,
    ) -> bool {
        self.residency(shared, slot, block) != Residency::Absent && !tree.has_alias(block)
    }

    #[inline]
    fn residency(&self, shared: &Shared, slot: Slot, block: BlockId) -> Residency {
        let (page, offset) = locate(block);
        let (_, body) = shared.pages.get(page);
        self.sets
            .residency(&shared.sets, body.owners[offset].load(Relaxed), slot)
    }

    /// Changes where a tree has a block. [`Writer::invalidate`] must come before the first change to a
    /// page, and [`Writer::refresh`] after the last.
    #[inline]
    fn set_residency(&mut self, shared: &Shared, slot: Slot, block: BlockId, residency: Residency) {
        let (page, offset) = locate(block);
        let owners = &shared.pages.get(page).1.owners[offset];
        let old = owners.load(Relaxed);
        let new = self.sets.with_residency(&shared.sets, old, slot, residency);
        if new == old {
            return;
        }
        self.sets.retain(new, 1);
        // Readers must see the new set before the old one may be reused.
        owners.store(new, Release);
        self.sets.release(&shared.sets, old, 1);
        if old == EMPTY_SET {
            self.meta_mut(page).owned += 1;
            self.blocks += 1;
        } else if new == EMPTY_SET {
            self.note_unowned(page, offset);
        }
    }

    /// A block's last owner has gone.
    fn note_unowned(&mut self, page: PageId, offset: usize) {
        self.blocks -= 1;
        let meta = self.meta_mut(page);
        meta.owned -= 1;
        if meta.named >> offset & 1 == 1 {
            meta.named &= !(1 << offset);
            let name = self.chunk(page).rows[page as usize % CHUNK].names[offset];
            self.names.remove_soon(name, block_id(page, offset));
        }
    }

    /// Removes a page's common owner set, which refers to a set without being counted: it must not
    /// outlive the blocks that it was taken from.
    #[inline]
    fn invalidate(&self, shared: &Shared, page: PageId) {
        shared.pages.get(page).0.common.store(EMPTY_SET, Relaxed);
    }

    /// Brings a page up to date with its blocks' owners: their common set, shorter if its last blocks
    /// have no owner, free if none has.
    #[inline]
    fn refresh(&mut self, shared: &Shared, page: PageId) {
        if self.meta(page).owned == 0 {
            self.free_page(shared, page);
            return;
        }
        let (head, body) = shared.pages.get(page);
        let old = head.len();
        let mut len = old;
        while len > 0 && body.owners[len - 1].load(Relaxed) == EMPTY_SET {
            len -= 1;
        }
        if len == old {
            // Release: whoever sees this id sees the set. The page's version does not change here.
            head.common.store(body.common(len), Release);
            return;
        }
        head.open();
        head.last.store(body.paths[len - 1].load(Relaxed), Relaxed);
        head.common.store(body.common(len), Relaxed);
        head.close(len);
    }
}

/// What the trees, sets and tables of a chunk's pages usually take at most.
const SIDE_BYTES: usize = CHUNK * 64;

/// What the names of a chunk's blocks may take: buckets that were just split are three eighths full.
const NAMES_BYTES: usize = CHUNK * SEGMENT_BLOCKS * 22;
