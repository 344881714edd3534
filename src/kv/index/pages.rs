//! What lookups read: pages of up to 16 consecutive blocks of a chain, found by the path hash of their first block, and
//! which trees own the blocks. There are no links from block to block: a block's path hash stands for everything before
//! it.

use std::mem;

use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;
use smallvec::SmallVec;

use crate::ids::WorkerId;
use crate::kv::block::SEGMENT_BLOCKS;
use crate::kv::event::{EngineHash, Tier};

/// A tree's number in its index.
pub(super) type Slot = u32;

pub(super) type PageId = u32;

/// A [`BlockId`] has no numbers for more pages.
pub(super) const MAX_PAGES: usize = u32::MAX as usize / SEGMENT_BLOCKS;

/// A block's page and its position there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct BlockId(u32);

impl BlockId {
    #[inline]
    pub(super) fn new(page: PageId, offset: usize) -> Self {
        Self(page * SEGMENT_BLOCKS as u32 + offset as u32)
    }

    /// The block's bit among those of its page.
    #[inline]
    pub(super) fn bit(self) -> u16 {
        1 << self.offset()
    }

    #[inline]
    pub(super) fn page(self) -> PageId {
        self.0 / SEGMENT_BLOCKS as u32
    }

    #[inline]
    pub(super) fn offset(self) -> usize {
        self.0 as usize % SEGMENT_BLOCKS
    }
}

/// The blocks of a page that one tree owns.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageOwner {
    pub(super) slot: Slot,
    /// A bit for each block, at the fastest tier that has a copy of it.
    pub(super) tiers: [u16; Tier::COUNT],
}

impl PageOwner {
    #[inline]
    pub(super) fn blocks(&self) -> u16 {
        self.tiers.iter().fold(0, |all, tier| all | tier)
    }
}

/// In this order, what a lookup of the whole page reads lies together: the last path hash and what follows it.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Page {
    pub(super) paths: [u64; SEGMENT_BLOCKS],
    len: u8,
    /// Blocks that any tree owns, a bit each.
    pub(super) owned: u16,
    /// Blocks whose name is in the table of names, a bit each.
    named: u16,
    /// Blocks before the first one.
    pub(super) depth: u32,
    /// Sorted by slot. The second of two owners still needs no memory of its own.
    pub(super) owners: SmallVec<[PageOwner; 2]>,
    /// The path hash before the first block.
    pub(super) parent_path: u64,
    /// The block before the first one, as it was once: a guess.
    pub(super) parent: Option<BlockId>,
    names: [EngineHash; SEGMENT_BLOCKS],
}

impl Page {
    /// Up to the last block that any tree owns.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len.into()
    }

    #[inline]
    pub(super) fn has_path_at(&self, offset: usize, path: u64) -> bool {
        offset < self.len() && self.paths[offset] == path
    }

    /// The name of a block in the table of names.
    #[inline]
    pub(super) fn name(&self, offset: usize) -> Option<EngineHash> {
        (self.named >> offset & 1 == 1).then(|| self.names[offset])
    }

    pub(super) fn set_name(&mut self, offset: usize, name: EngineHash) {
        self.names[offset] = name;
        self.named |= 1 << offset;
    }

    pub(super) fn take_name(&mut self, offset: usize) -> Option<EngineHash> {
        let name = self.name(offset);
        self.named &= !(1 << offset);
        name
    }

    #[inline]
    fn position_of(&self, slot: Slot) -> Result<usize, usize> {
        self.owners.binary_search_by_key(&slot, |owner| owner.slot)
    }

    #[inline]
    pub(super) fn owner(&self, slot: Slot) -> Option<&PageOwner> {
        self.position_of(slot).ok().map(|at| &self.owners[at])
    }

    /// The fastest tier where a tree has a block.
    #[inline]
    pub(super) fn residency(&self, slot: Slot, offset: usize) -> Option<Tier> {
        let owner = self.owner(slot)?;
        let is_in = |tier: &Tier| owner.tiers[*tier as usize] >> offset & 1 == 1;
        Tier::ALL.into_iter().find(is_in)
    }

    /// Of some blocks (a bit each). Returns whether the tree came to the page or has left it.
    fn set_residency(&mut self, slot: Slot, blocks: u16, residency: Option<Tier>) -> bool {
        let (at, is_new) = match self.position_of(slot) {
            Ok(at) => (at, false),
            Err(at) => {
                let tiers = [0; Tier::COUNT];
                self.owners.insert(at, PageOwner { slot, tiers });
                (at, true)
            }
        };
        let owner = &mut self.owners[at];
        owner.tiers.iter_mut().for_each(|tier| *tier &= !blocks);
        if let Some(tier) = residency {
            owner.tiers[tier as usize] |= blocks;
            self.owned |= blocks;
            return is_new;
        }
        let has_left = owner.blocks() == 0;
        if has_left {
            self.owners.remove(at);
            if self.owners.len() * 4 < self.owners.capacity() {
                self.owners.shrink_to_fit();
            }
        }
        // Mostly one of the first owners has all of them.
        let mut unowned = blocks;
        for owner in &self.owners {
            unowned &= !owner.blocks();
            if unowned == 0 {
                break;
            }
        }
        self.owned &= !unowned;
        self.len = (u16::BITS - self.owned.leading_zeros()) as u8;
        has_left
    }

    fn heap_bytes(&self) -> usize {
        if self.owners.spilled() {
            self.owners.capacity() * size_of::<PageOwner>()
        } else {
            0
        }
    }
}

/// Where the next block of a chain goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChainEnd {
    /// Path hash of the last block, or of the root.
    pub(super) path: u64,
    /// Blocks so far.
    pub(super) depth: u32,
    /// The last block; none at a chain's start.
    pub(super) block: Option<BlockId>,
}

/// The dp rank that a slot stands for.
#[derive(Clone, Copy, Debug)]
pub(super) struct RankOfSlot {
    pub(super) worker: WorkerId,
    pub(super) rank: u32,
    pub(super) is_visible: bool,
}

/// Pages by the path hash of their first block.
type Starts = HashMap<u64, PageId, FxBuildHasher>;

/// Other sizes of [`Pages`]' two tables; none for one that stays as it is.
pub(super) type ResizedStarts = [Option<Starts>; 2];

/// A table with more entries takes long to resize: that is not done while lookups wait.
pub(super) const LARGE_TABLE: usize = 1_024;

#[derive(Debug, Default)]
pub(super) struct Pages {
    pages: Vec<Option<Box<Page>>>,
    free: Vec<PageId>,
    /// Those pages that start a segment, and those that start within one, where a chain forks off another. The second
    /// table is the smaller one, and is asked for each new block.
    starts: [Starts; 2],
    pub(super) slots: Vec<Option<RankOfSlot>>,
    /// Memory of the pages' lists of owners.
    owner_bytes: usize,
}

impl Pages {
    #[inline]
    pub(super) fn find(&self, page: PageId) -> Option<&Page> {
        self.pages.get(page as usize)?.as_deref()
    }

    /// A page that is known to exist.
    #[inline]
    pub(super) fn get(&self, page: PageId) -> &Page {
        self.find(page).expect("it has blocks")
    }

    #[inline]
    pub(super) fn get_mut(&mut self, page: PageId) -> &mut Page {
        let page = self.pages[page as usize].as_deref_mut();
        page.expect("it has blocks")
    }

    /// Whether the table of names has this name for a block.
    #[inline]
    pub(super) fn has_name(&self, block: BlockId, name: EngineHash) -> bool {
        self.get(block.page()).name(block.offset()) == Some(name)
    }

    /// The page that begins with the block with this path hash, which has `depth` blocks before it.
    #[inline]
    pub(super) fn starting_with(&self, path: u64, depth: u32) -> Option<PageId> {
        self.starts[table_at(depth)].get(&path).copied()
    }

    pub(super) fn slot_of(&self, worker: WorkerId, rank: u32) -> Option<Slot> {
        let is_it = |of: &RankOfSlot| of.worker == worker && of.rank == rank;
        let mut slots = self.slots.iter();
        let slot = slots.position(|of| of.as_ref().is_some_and(is_it))?;
        Some(slot as Slot)
    }

    pub(super) fn in_use(&self) -> usize {
        self.pages.len() - self.free.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.in_use() * size_of::<Page>()
            + self.pages.capacity() * size_of::<Option<Box<Page>>>()
            + self.free.capacity() * size_of::<PageId>()
            + self
                .starts
                .each_ref()
                .map(HashMap::allocation_size)
                .iter()
                .sum::<usize>()
            + self.slots.capacity() * size_of::<Option<RankOfSlot>>()
            + self.owner_bytes
    }

    /// What `bytes` returns, counted by a walk over all pages.
    #[cfg(test)]
    pub(super) fn recount(&self) -> usize {
        let pages = self.pages.iter().flatten();
        let owners: usize = pages.map(|page| page.heap_bytes()).sum();
        self.bytes() - self.owner_bytes + owners
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = PageId> {
        let pages = (0..).zip(&self.pages);
        pages.filter_map(|(id, page)| page.is_some().then_some(id))
    }

    /// The end of the chain whose last block this is.
    pub(super) fn end_at(&self, block: BlockId) -> ChainEnd {
        let page = self.get(block.page());
        ChainEnd {
            path: page.paths[block.offset()],
            depth: page.depth + block.offset() as u32 + 1,
            block: Some(block),
        }
    }

    /// The position after a chain's end in the same page. None if the segment is full, or the end is not there any
    /// more.
    #[inline]
    fn after(&self, end: &ChainEnd) -> Option<BlockId> {
        let last = end.block?;
        let is_full = (end.depth as usize).is_multiple_of(SEGMENT_BLOCKS);
        let page = self.find(last.page()).filter(|_| !is_full)?;
        page.has_path_at(last.offset(), end.path)
            .then(|| BlockId::new(last.page(), last.offset() + 1))
    }

    /// The block that continues a chain with this path hash, if any tree owns it or a later one of its page.
    #[inline]
    pub(super) fn find_after(&self, end: &ChainEnd, path: u64) -> Option<BlockId> {
        let in_page = self.after(end).filter(|next| {
            let page = self.get(next.page());
            page.has_path_at(next.offset(), path)
        });
        in_page.or_else(|| Some(BlockId::new(self.starting_with(path, end.depth)?, 0)))
    }

    /// Adds a block that [`Self::find_after`] does not find. A tree is to own it at once.
    #[inline]
    pub(super) fn add(&mut self, end: &ChainEnd, path: u64) -> BlockId {
        if let Some(next) = self.after(end) {
            let page = self.get_mut(next.page());
            if page.len() == next.offset() {
                page.paths[next.offset()] = path;
                page.len += 1;
                return next;
            }
        }
        let mut page = Box::new(Page {
            paths: [0; SEGMENT_BLOCKS],
            names: [EngineHash(0); SEGMENT_BLOCKS],
            owners: SmallVec::new(),
            parent_path: end.path,
            parent: end.block,
            depth: end.depth,
            owned: 0,
            named: 0,
            len: 1,
        });
        page.paths[0] = path;
        let id = self.free.pop().unwrap_or_else(|| {
            self.pages.push(None);
            self.pages.len() as PageId - 1
        });
        self.pages[id as usize] = Some(page);
        self.starts[table_at(end.depth)].insert(path, id);
        BlockId::new(id, 0)
    }

    /// Says in which tier a tree has some blocks of a page (a bit each). Returns whether the tree came to the page or
    /// has left it.
    pub(super) fn set_residency(
        &mut self,
        slot: Slot,
        page: PageId,
        blocks: u16,
        residency: Option<Tier>,
    ) -> bool {
        let page = self.pages[page as usize].as_deref_mut();
        let page = page.expect("it has blocks");
        let before = page.heap_bytes();
        let has_changed = page.set_residency(slot, blocks, residency);
        self.owner_bytes = self.owner_bytes + page.heap_bytes() - before;
        has_changed
    }

    /// Removes a page whose last block has no owner any more.
    pub(super) fn remove_if_empty(&mut self, id: PageId) {
        if let Some(page) = self.find(id).filter(|page| page.len() == 0) {
            let (first, depth) = (page.paths[0], page.depth);
            self.owner_bytes -= page.heap_bytes();
            self.starts[table_at(depth)].remove(&first);
            self.pages[id as usize] = None;
            self.free.push(id);
        }
    }

    /// The lists of pages and of free numbers, to be freed when there is no page left. Whoever still has a page's
    /// number looks for it by [`Self::find`].
    pub(super) fn take_unused(&mut self) -> (Vec<Option<Box<Page>>>, Vec<PageId>) {
        (mem::take(&mut self.pages), mem::take(&mut self.free))
    }

    /// Copies, with room, of the large tables that have none for so many more pages.
    pub(super) fn larger_starts(&self, more: usize) -> ResizedStarts {
        self.starts.each_ref().map(|starts| {
            let is_full = starts.capacity() - starts.len() < more;
            (is_full && starts.len() > LARGE_TABLE).then(|| with_room(starts))
        })
    }

    /// Smaller copies of the tables that are mostly unused.
    pub(super) fn smaller_starts(&self) -> ResizedStarts {
        self.starts.each_ref().map(|starts| {
            let is_sparse = starts.capacity() > 64 + starts.len() * 4;
            is_sparse.then(|| with_room(starts))
        })
    }

    /// Exchanges tables for copies of them, which nothing was added to or removed from since.
    pub(super) fn swap_starts(&mut self, resized: &mut ResizedStarts) {
        for (starts, resized) in self.starts.iter_mut().zip(resized) {
            if let Some(resized) = resized {
                mem::swap(starts, resized);
            }
        }
    }
}

/// A copy of a table, with room for as many pages again.
fn with_room(starts: &Starts) -> Starts {
    let mut copy = Starts::with_capacity_and_hasher(starts.len() * 2, FxBuildHasher);
    copy.extend(starts);
    copy
}

fn table_at(depth: u32) -> usize {
    usize::from(!(depth as usize).is_multiple_of(SEGMENT_BLOCKS))
}
