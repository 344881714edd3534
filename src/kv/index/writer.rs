//! The one who changes an index, behind its lock: what stores and removals need beside what readers
//! see. Finding a block by name, and the bookkeeping of pages; [`store`] and [`remove`] do the rest.

mod cut;
mod hold;
mod remove;
mod store;
mod tree;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};

use super::Shared;
use super::holders::{Mark, NOBODY, Registry, Slot, TREES_MAX};
use super::names::Names;
use super::pages::{BlockId, CHUNK, NONE, PageId, Pages, place_of};
use super::simd::prefetch;
use super::table::Table;
use crate::ids::WorkerId;
use crate::kv::block::{Path, STRETCH};
use crate::kv::event::Name;
pub(super) use tree::Known;

/// What only the writer needs of a page, beside its blocks' names.
#[derive(Clone, Debug, Default)]
struct Meta {
    /// The path before the first block.
    up_path: u64,
    /// The block before the first as it was once: a guess.
    up: BlockId,
    /// Of the first block.
    depth: u32,
    /// Which of the names are in the table of names.
    named: u32,
    /// Blocks that anyone holds. Neither is shorter than a register: a load of both after a store to
    /// one would wait for the store.
    live: u32,
}

/// All that only the writer needs of a page, side by side: one look at a block far away costs the
/// processor one translation of an address, and not two.
#[derive(Clone, Debug, Default)]
struct Row {
    meta: Meta,
    names: [u64; STRETCH],
}

/// What only the writer needs of a chunk of pages.
#[derive(Debug)]
struct Chunk {
    rows: Box<[Row]>,
}

impl Chunk {
    const BYTES: usize = CHUNK * size_of::<Row>();

    fn new() -> Self {
        Self {
            rows: vec![Row::default(); CHUNK].into(),
        }
    }

    #[inline]
    fn has_name(&self, page: PageId, at: usize, name: u64) -> bool {
        let page = page as usize % CHUNK;
        let row = &self.rows[page];
        row.names[at] == name && row.meta.named >> at & 1 == 1
    }
}

#[derive(Debug)]
pub(super) struct Writer {
    chunks: Vec<Chunk>,
    names: Names,
    /// Pages by the path of their first block: those that begin a stretch, and those within one.
    starts: Directory,
    forks: Directory,
    free: Vec<PageId>,
    /// Pages from here on were never used.
    fresh: PageId,
    sets: Registry,
    trees: Vec<Option<Box<Known>>>,
    free_slots: BTreeSet<Slot>,
    /// Names of blocks that nobody holds any more, still in the table.
    dead: Vec<(u64, BlockId)>,
    /// A bit for the paths that forks may begin with, to ask the table only rarely: of 64 Ki.
    fork_bits: Box<[u64; 1024]>,
    /// Forks that went and still have their bit.
    forks_gone: u32,
    /// Scratch.
    paths: Vec<u64>,
    /// Blocks that anyone holds.
    pub(super) blocks: u64,
    /// Blocks, once for each tree that holds them.
    pub(super) memberships: u64,
    /// Goes up with every store, to tell which tree is the coldest.
    clock: u64,
    trees_bytes: usize,
    /// Blocks that the memory bound took since this was last looked at.
    pub(super) cut_blocks: u64,
}

/// A table as the writer has it.
#[derive(Debug)]
struct Directory {
    table: Arc<Table>,
    len: usize,
}

impl Writer {
    pub(super) fn new(starts: Arc<Table>, forks: Arc<Table>) -> Self {
        let directory = |table| Directory { table, len: 0 };
        Self {
            chunks: Vec::new(),
            names: Names::new(),
            starts: directory(starts),
            forks: directory(forks),
            free: Vec::new(),
            fresh: 0,
            sets: Registry::new(),
            trees: Vec::new(),
            free_slots: BTreeSet::new(),
            dead: Vec::new(),
            fork_bits: Box::new([0; 1024]),
            forks_gone: 0,
            paths: Vec::new(),
            blocks: 0,
            memberships: 0,
            clock: 0,
            trees_bytes: 0,
            cut_blocks: 0,
        }
    }

    /// None where there are more trees than a set can hold.
    pub(super) fn plant(&mut self, shared: &Shared, worker: WorkerId, rank: u32) -> Option<Slot> {
        let slot = match self.free_slots.pop_first() {
            Some(slot) => slot,
            None if self.trees.len() < TREES_MAX => {
                self.trees.push(None);
                self.trees.len() as Slot - 1
            }
            None => return None,
        };
        self.trees[slot as usize] = Some(Box::default());
        shared.roster.plant(slot, worker, rank);
        Some(slot)
    }

    /// Forgets a tree and all that it holds; its number is free then.
    pub(super) fn fell(&mut self, shared: &Shared, slot: Slot) {
        self.clear(shared, slot);
        shared.roster.fell(slot);
        if let Some(known) = self.trees[slot as usize].take() {
            self.trees_bytes -= known.counted_bytes;
        }
        self.free_slots.insert(slot);
    }

    pub(super) fn tree(&self, slot: Slot) -> Option<&Known> {
        self.trees.get(slot as usize)?.as_deref()
    }

    pub(super) fn tree_mut(&mut self, slot: Slot) -> Option<&mut Known> {
        self.trees.get_mut(slot as usize)?.as_deref_mut()
    }

    /// All that is allocated.
    pub(super) fn bytes(&self) -> usize {
        self.side_bytes() + self.names.bytes() + self.page_bytes()
    }

    /// What is bounded: what grows with the blocks of the pages counts as if all pages were full, since
    /// they may be, and pages are not given back.
    pub(super) fn bounded_bytes(&self) -> usize {
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
    }

    fn page_bytes(&self) -> usize {
        self.chunks.len() * (CHUNK * Pages::BYTES + Chunk::BYTES)
    }

    #[inline]
    fn meta(&self, page: PageId) -> &Meta {
        &self.chunks[page as usize / CHUNK].rows[page as usize % CHUNK].meta
    }

    #[inline]
    fn meta_mut(&mut self, page: PageId) -> &mut Meta {
        &mut self.chunks[page as usize / CHUNK].rows[page as usize % CHUNK].meta
    }

    #[inline]
    fn chunk(&self, page: PageId) -> &Chunk {
        &self.chunks[page as usize / CHUNK]
    }

    /// Whether a block has this name in the common table.
    #[inline]
    fn has_name(&self, block: BlockId, name: Name) -> bool {
        let (page, at) = place_of(block);
        self.chunk(page).has_name(page, at, name.0)
    }

    /// Asks for all that is read of a block, or written behind it, at once.
    #[inline]
    fn prefetch_block(&self, shared: &Shared, block: BlockId) {
        let (page, at) = place_of(block);
        let (head, body) = shared.pages.at(page);
        let row = &self.chunk(page).rows[page as usize % CHUNK];
        prefetch(head);
        prefetch(&body.paths[at]);
        prefetch(&body.held);
        prefetch(&row.meta);
        prefetch(&row.names[at]);
    }

    /// The block that a tree knows by this name.
    #[inline]
    fn resolve(&self, shared: &Shared, known: &Known, slot: Slot, name: Name) -> Option<BlockId> {
        if let Some(block) = known.alias(name) {
            return Some(block);
        }
        let block = self.names.find(name.0, |block| {
            let (page, at) = place_of(block);
            self.prefetch_block(shared, block);
            self.chunk(page).has_name(page, at, name.0)
        })?;
        self.knows_by_own_name(shared, known, slot, block)
            .then_some(block)
    }

    /// Whether a tree holds a block, and by the name that the block has in the common table.
    #[inline]
    fn knows_by_own_name(
        &self,
        shared: &Shared,
        known: &Known,
        slot: Slot,
        block: BlockId,
    ) -> bool {
        self.mark(shared, slot, block) != Mark::Absent && !known.has_alias(block)
    }

    #[inline]
    fn mark(&self, shared: &Shared, slot: Slot, block: BlockId) -> Mark {
        let (page, at) = place_of(block);
        let (_, body) = shared.pages.at(page);
        self.sets
            .mark(&shared.sets, body.held[at].load(Relaxed), slot)
    }

    /// The page that begins with a block.
    #[inline]
    fn page_of(&self, shared: &Shared, path: u64, depth: u32) -> Option<PageId> {
        let directory = if is_start(depth) {
            &self.starts
        } else if has_fork_bit(&self.fork_bits, path) {
            &self.forks
        } else {
            return None;
        };
        directory.table.find(Path(path).mixed(), |page| {
            shared.pages.at(page).0.first.load(Relaxed) == path
        })
    }

    /// The page that the chain of a block went on in last, at a stretch's end, if it begins with a path.
    #[inline]
    fn page_after(&self, shared: &Shared, block: BlockId, path: u64) -> Option<PageId> {
        if block == NONE {
            return None;
        }
        let (page, _) = place_of(block);
        let next = shared.pages.at(page).0.next.load(Relaxed);
        let head = shared.pages.head(next)?;
        (head.first.load(Relaxed) == path && head.len() > 0).then_some(next)
    }

    /// A page for a block that has none; `up` is the block before it. None where memory is at its
    /// bound.
    fn new_page(
        &mut self,
        shared: &Shared,
        path: u64,
        depth: u32,
        up: BlockId,
        up_path: u64,
    ) -> Option<PageId> {
        let page = match self.free.pop() {
            Some(page) => page,
            None if (self.fresh as usize) < self.chunks.len() * CHUNK => {
                self.fresh += 1;
                self.fresh - 1
            }
            None => return None,
        };
        let (head, _) = shared.pages.at(page);
        head.open();
        head.first.store(path, Relaxed);
        head.all.store(NOBODY, Relaxed);
        head.next.store(NONE, Relaxed);
        head.close(0);
        let meta = self.meta_mut(page);
        meta.up_path = up_path;
        meta.up = up;
        meta.depth = depth;
        meta.named = 0;
        meta.live = 0;
        let (directory, seen) = if is_start(depth) {
            (&mut self.starts, &shared.starts)
        } else {
            self.fork_bits[(path >> 54) as usize] |= 1 << (path >> 48 & 63);
            (&mut self.forks, &shared.forks)
        };
        directory.len += 1;
        if directory.table.is_full(directory.len) {
            let room = directory.len + directory.len / 4 + 8;
            directory.table = Arc::new(directory.table.grown(room));
            directory.table.insert(Path(path).mixed(), page);
            seen.store(directory.table.clone());
        } else {
            directory.table.insert(Path(path).mixed(), page);
        }
        Some(page)
    }

    /// A page that nobody holds anything of.
    fn free_page(&mut self, shared: &Shared, page: PageId) {
        let (head, _) = shared.pages.at(page);
        let first = head.first.load(Relaxed);
        let directory = if is_start(self.meta(page).depth) {
            &mut self.starts
        } else {
            &mut self.forks
        };
        directory.table.remove(Path(first).mixed(), page);
        directory.len -= 1;
        self.forks_gone += u32::from(!is_start(
            self.chunks[page as usize / CHUNK].rows[page as usize % CHUNK]
                .meta
                .depth,
        ));
        if self.forks_gone > FORKS_GONE_MAX {
            self.forks_gone = 0;
            self.fork_bits.fill(0);
            for fork in self.forks.table.pages() {
                let path = shared.pages.at(fork).0.first.load(Relaxed);
                self.fork_bits[(path >> 54) as usize] |= 1 << (path >> 48 & 63);
            }
        }
        head.open();
        head.all.store(NOBODY, Relaxed);
        head.close(0);
        self.free.push(page);
    }

    /// Lets a tree say something else of a block. Before the first change to a page its common word
    /// must be taken back ([`Writer::unsettle`]), and [`Writer::settle`] follows the last.
    #[inline]
    fn set_mark(&mut self, shared: &Shared, slot: Slot, block: BlockId, mark: Mark) {
        let (page, at) = place_of(block);
        let held = &shared.pages.at(page).1.held[at];
        let old = held.load(Relaxed);
        let new = self.sets.with(&shared.sets, old, slot, mark);
        if new == old {
            return;
        }
        self.sets.retain(new, 1);
        // First where readers look, then the set may be reused.
        held.store(new, Release);
        self.sets.release(&shared.sets, old, 1);
        if old == NOBODY {
            self.meta_mut(page).live += 1;
            self.blocks += 1;
        } else if new == NOBODY {
            self.blocks -= 1;
            let meta = self.meta_mut(page);
            meta.live -= 1;
            if meta.named >> at & 1 == 1 {
                meta.named &= !(1 << at);
                let name = self.chunk(page).rows[page as usize % CHUNK].names[at];
                self.dead.push((name, block));
            }
        }
    }

    /// The word of a page's common holders refers to a set without being counted, so it must not
    /// outlive the blocks that it was read off.
    #[inline]
    fn unsettle(&self, shared: &Shared, page: PageId) {
        shared.pages.at(page).0.all.store(NOBODY, Relaxed);
    }

    /// Makes a page what its blocks' holders say: shorter where its last ones have none, free where
    /// none has.
    #[inline]
    fn settle(&mut self, shared: &Shared, page: PageId) {
        if self.meta(page).live == 0 {
            self.free_page(shared, page);
            return;
        }
        let (head, body) = shared.pages.at(page);
        let old = head.len();
        let mut len = old;
        while len > 0 && body.held[len - 1].load(Relaxed) == NOBODY {
            len -= 1;
        }
        if len == old {
            // Who sees this word sees the set that it stands for: the page's version does not change here.
            head.all.store(body.common(len), Release);
            return;
        }
        head.open();
        head.last.store(body.paths[len - 1].load(Relaxed), Relaxed);
        head.all.store(body.common(len), Relaxed);
        head.close(len);
    }

    /// Takes the names of dead blocks out of the table.
    #[inline]
    fn bury(&mut self) {
        for (name, _) in &self.dead {
            self.names.prefetch(*name);
        }
        for (name, block) in self.dead.drain(..) {
            self.names.remove(name, block);
        }
    }
}

/// Whether a block begins a stretch.
#[inline]
fn is_start(depth: u32) -> bool {
    (depth as usize).is_multiple_of(STRETCH)
}

#[inline]
fn has_fork_bit(bits: &[u64; 1024], path: u64) -> bool {
    bits[(path >> 54) as usize] >> (path >> 48 & 63) & 1 == 1
}

/// Bits of forks that went are taken back when there are so many.
const FORKS_GONE_MAX: u32 = 4096;

/// What the trees, sets and tables of a chunk's pages mostly take at most.
const SIDE_BYTES: usize = CHUNK * 64;

/// What the names of a chunk's blocks may take: segments that were just split are three eighths full.
const NAMES_BYTES: usize = CHUNK * STRETCH * 22;
