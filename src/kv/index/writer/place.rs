//! Places consecutive blocks of a chain in pages: first blocks that the index has, then new ones.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use super::Writer;
use super::copies::StoreContext;
use super::page_alloc::is_segment_start;
use super::tree_state::TreeState;
use crate::kv::block::{PathHash, SEGMENT_BLOCKS};
use crate::kv::event::{EngineHash, Tier};
use crate::kv::index::name_table::{Insert, NameHash};
use crate::kv::index::owner_sets::{Residency, SetId, sole_owner};
use crate::kv::index::pages::{BlockId, Body, CHUNK, LOOKAHEAD, NO_ID, PageId, block_id, locate};
use crate::kv::index::shared::Shared;
use crate::kv::index::types::NewBlock;

/// How many names ahead the name table's cache lines are asked for.
const AHEAD: usize = 32;

/// Where the next block of a chain goes.
#[derive(Clone, Copy)]
pub(super) struct ChainEnd {
    /// Path hash of the last block, or of the root.
    pub(super) path: u64,
    /// Blocks so far.
    pub(super) depth: u32,
    /// The last block; [`NO_ID`] at a chain's start.
    pub(super) block: BlockId,
    /// The pages of the last segments, each at its segment's number modulo [`LOOKAHEAD`]; [`NO_ID`]
    /// where the page is not known.
    pub(super) trail: [PageId; LOOKAHEAD],
}

/// Blocks on their way into pages.
struct Placement<'a> {
    store: StoreContext,
    /// The owner set of new blocks.
    owner: SetId,
    blocks: &'a [NewBlock],
    /// The hashes of their names.
    names: &'a [NameHash],
    /// The blocks' path hashes, and the one before them.
    paths: &'a [u64],
    before: u64,
    /// Blocks of the chain before them.
    start: u32,
    /// How many are placed.
    placed: usize,
    end: &'a mut ChainEnd,
}

impl Placement<'_> {
    #[inline]
    fn is_complete(&self) -> bool {
        self.placed == self.blocks.len()
    }

    /// Blocks of the chain before the next one.
    #[inline]
    fn depth(&self) -> u32 {
        self.start + self.placed as u32
    }

    /// The next blocks are in a page now, up to an offset.
    #[inline]
    fn advance(&mut self, blocks: usize, page: PageId, offset: usize) {
        self.placed += blocks;
        self.end.block = block_id(page, offset - 1);
    }
}

impl Writer {
    /// Places blocks after `end`, which moves on. Returns how many; fewer than given at the memory
    /// limit.
    pub(super) fn place(
        &mut self,
        shared: &Shared,
        tree: &mut TreeState,
        store: StoreContext,
        end: &mut ChainEnd,
        blocks: &[NewBlock],
    ) -> usize {
        let names = self.hash_names(blocks);
        let paths = self.hash_paths(*end, blocks);
        // The page and the offset in it where the next block goes, if known.
        let mut next = (NO_ID, 0);
        if end.block != NO_ID && !is_segment_start(end.depth) {
            let (page, offset) = locate(end.block);
            next = (page, offset + 1);
        }
        let mut placement = Placement {
            store,
            owner: sole_owner(store.slot, store.residency),
            blocks,
            names: &names,
            paths: &paths,
            before: end.path,
            start: end.depth,
            placed: 0,
            end,
        };
        while !placement.is_complete() {
            if next.0 == NO_ID {
                let Some(page) = self.next_page(shared, &mut placement) else {
                    break;
                };
                next = (page, 0);
            }
            let (page, offset) = next;
            let clock = self.clock;
            let meta = self.meta_mut(page);
            meta.stored_at = clock;
            let room = SEGMENT_BLOCKS - meta.depth as usize % SEGMENT_BLOCKS;
            self.invalidate(shared, page);
            let offset = self.own_known_blocks(shared, tree, &mut placement, page, offset);
            next = (NO_ID, 0);
            let is_at_end = offset == shared.pages.get(page).0.len();
            if is_at_end && offset < room && !placement.is_complete() {
                next = self.add_new_blocks(shared, tree, &mut placement, page, offset..room);
                if next.0 == page {
                    continue;
                }
            }
            if self.meta(page).owned > 0 {
                self.refresh(shared, page);
            }
        }
        let placed = placement.placed;
        end.path = placed.checked_sub(1).map_or(end.path, |last| paths[last]);
        end.depth += placed as u32;
        self.paths = paths;
        self.name_hashes = names;
        placed
    }

    /// The hashes of the blocks' names, in scratch space. Asks for the cache lines that are read next.
    #[inline]
    fn hash_names(&mut self, blocks: &[NewBlock]) -> Vec<NameHash> {
        let mut names = std::mem::take(&mut self.name_hashes);
        names.clear();
        names.extend(blocks.iter().map(|block| NameHash::of(block.name.0)));
        for name in names.iter().take(AHEAD) {
            self.names.prefetch(*name);
        }
        names
    }

    /// The path hashes of blocks after `end`, in scratch space. Asks for the cache lines that are read next.
    #[inline]
    fn hash_paths(&mut self, end: ChainEnd, blocks: &[NewBlock]) -> Vec<u64> {
        let mut paths = std::mem::take(&mut self.paths);
        paths.clear();
        let mut path = PathHash(end.path);
        paths.extend(blocks.iter().zip(end.depth..).map(|(block, depth)| {
            path = path.step(block.local, depth);
            path.0
        }));
        let into_segment = end.depth as usize % SEGMENT_BLOCKS;
        let to_segment = (SEGMENT_BLOCKS - into_segment) % SEGMENT_BLOCKS;
        for path in paths.iter().skip(to_segment).step_by(SEGMENT_BLOCKS) {
            self.starts.table.prefetch(PathHash(*path).mixed());
        }
        paths
    }

    /// The page that begins with the next block, found or new; linked to the pages before it. None at the memory limit.
    #[inline]
    fn next_page(&mut self, shared: &Shared, placement: &mut Placement) -> Option<PageId> {
        let (depth, path) = (placement.depth(), placement.paths[placement.placed]);
        let last = placement.end.block;
        let parent = if is_segment_start(depth) { last } else { NO_ID };
        let guess = self.page_after(shared, parent, path);
        let found = guess
            .or_else(|| self.page_of(shared, path, depth))
            .or_else(|| {
                let before = placement.placed.checked_sub(1);
                let before = before.map_or(placement.before, |last| placement.paths[last]);
                self.new_page(shared, path, depth, last, before)
            });
        let page = found?;
        if is_segment_start(depth) {
            let trail = &mut placement.end.trail;
            let before = &mut trail[depth as usize / SEGMENT_BLOCKS % LOOKAHEAD];
            if let Some((_, far)) = shared.pages.ahead(std::mem::replace(before, page)) {
                far.store(page, Relaxed);
            }
        }
        if guess.is_none() && parent != NO_ID {
            let (parent, _) = locate(parent);
            shared.pages.get(parent).0.next.store(page, Relaxed);
        }
        self.meta_mut(page).parent = last;
        Some(page)
    }

    /// Makes the tree own the next blocks as far as the page has them, from `offset` on. Returns the offset after
    /// them.
    #[inline]
    fn own_known_blocks(
        &mut self,
        shared: &Shared,
        tree: &mut TreeState,
        placement: &mut Placement,
        page: PageId,
        mut offset: usize,
    ) -> usize {
        let (store, paths, blocks) = (placement.store, placement.paths, placement.blocks);
        let (head, body) = shared.pages.get(page);
        let mut added = 0;
        while !placement.is_complete()
            && offset < head.len()
            && body.paths[offset].load(Relaxed) == paths[placement.placed]
        {
            let placed = placement.placed;
            let block = block_id(page, offset);
            let run = if store.is_default {
                let (paths, blocks) = (&paths[placed..], &blocks[placed..]);
                self.add_owner_to_run(shared, tree, store, block, paths, blocks)
            } else {
                0
            };
            if run > 0 {
                tree.blocks[store.tier as usize] += run as u64;
                added += run;
                offset += run;
                placement.advance(run, page, offset);
                continue;
            }
            let name = blocks[placed].name;
            if self.has_other_name_in_gpu(shared, tree, store, block, name) {
                self.misnamed += 1;
                offset += 1;
                placement.advance(1, page, offset);
                continue;
            }
            let is_new = self.add_owner(shared, tree, store, block);
            added += usize::from(is_new);
            let is_known_so =
                self.has_name(block, name) && !tree.has_alias(block) && tree.alias(name).is_none();
            if !is_known_so {
                // The new name may make the tree forget other blocks of this page, not this one.
                tree.count_page(page, std::mem::take(&mut added));
                self.set_name(shared, tree, store, block, name, is_new);
                self.invalidate(shared, page);
            }
            offset += 1;
            placement.advance(1, page, offset);
        }
        tree.count_page(page, added);
        offset
    }

    /// Whether this is a copy in a lower tier, under a name of its own, of a block that the tree has in the GPU. A tree
    /// knows a block by one name, and the GPU's is the one that counts: later stores refer to it.
    #[inline]
    fn has_other_name_in_gpu(
        &self,
        shared: &Shared,
        tree: &TreeState,
        store: StoreContext,
        block: BlockId,
        name: EngineHash,
    ) -> bool {
        store.tier != Tier::Gpu
            && self.residency(shared, store.slot, block) == Residency::Gpu
            && !self.is_known_as(tree, block, name)
    }

    /// Adds the next blocks after a page's last one, to the offsets that are free. Returns where the block after them
    /// goes, if that is known.
    #[inline]
    fn add_new_blocks(
        &mut self,
        shared: &Shared,
        tree: &mut TreeState,
        placement: &mut Placement,
        page: PageId,
        free: Range<usize>,
    ) -> (PageId, usize) {
        let (store, paths, blocks) = (placement.store, placement.paths, placement.blocks);
        let (head, body) = shared.pages.get(page);
        let mut offset = free.start;
        let end = free.end.min(offset + blocks.len() - placement.placed);
        let mut next = (NO_ID, 0);
        head.prepare_append();
        while offset < end {
            let placed = placement.placed;
            let of_page = (
                &paths[placed..placed + end - offset],
                &blocks[placed..],
                &placement.names[placed..],
            );
            let new = self.append(tree, page, offset, placement.owner, body, of_page);
            if new > 0 {
                offset += new;
                placement.advance(new, page, offset);
            }
            if offset == end {
                break;
            }
            let (path, name) = (paths[placement.placed], blocks[placement.placed].name);
            if offset > 0
                && let Some(fork) = self.page_of(shared, path, placement.depth())
            {
                next = (fork, 0);
                break;
            }
            let block = block_id(page, offset);
            if tree.alias(name).is_some() {
                // The tree knows another block by this name.
                break;
            }
            match self.insert_name(block, name) {
                Insert::Done => {}
                Insert::Taken(other)
                    if self.owns_by_table_name(shared, tree, store.slot, other) =>
                {
                    break;
                }
                Insert::Taken(_) | Insert::NoRoom => tree.set_alias(block, name),
            }
            body.paths[offset].store(path, Relaxed);
            body.owners[offset].store(placement.owner, Relaxed);
            offset += 1;
            placement.advance(1, page, offset);
        }
        head.open();
        if offset > 0 {
            let last = body.paths[offset - 1].load(Relaxed);
            head.last.store(last, Relaxed);
        }
        head.close(offset);
        self.count_new(tree, store, page, free.start..offset);
        if next.0 == NO_ID && offset < end {
            let block = &blocks[placement.placed];
            next = self.evict_conflict(shared, tree, store, page, offset, block);
        }
        next
    }

    /// Makes the tree forget another block that it knows by the next block's name. Returns where the next
    /// block goes, if that is still known.
    #[cold]
    fn evict_conflict(
        &mut self,
        shared: &Shared,
        tree: &mut TreeState,
        store: StoreContext,
        page: PageId,
        offset: usize,
        next: &NewBlock,
    ) -> (PageId, usize) {
        if let Some(other) = self.resolve(shared, tree, store.slot, next.name) {
            self.forget(shared, tree, store.slot, other);
        }
        // A page without blocks was just made for the next block; any other may have been freed.
        let is_in_use = offset == 0 || self.meta(page).owned > 0;
        if is_in_use && shared.pages.get(page).0.len() == offset {
            (page, offset)
        } else {
            (NO_ID, 0)
        }
    }

    /// Appends blocks to a page as long as they are plainly new: no fork can begin with their path, no name in the table
    /// has the same hash, and the tree has no such alias. Returns how many.
    #[inline]
    fn append(
        &mut self,
        tree: &TreeState,
        page: PageId,
        first: usize,
        owner: SetId,
        body: &Body,
        (paths, blocks, hashes): (&[u64], &[NewBlock], &[NameHash]),
    ) -> usize {
        let Self { names, chunks, .. } = self;
        let chunk = &mut chunks[page as usize / CHUNK];
        let targets = body.paths[first..].iter().zip(&body.owners[first..]);
        let targets = targets
            .zip(&mut chunk.rows[page as usize % CHUNK].names[first..])
            .zip(first..);
        let new = paths.iter().zip(blocks).zip(hashes).zip(targets);
        let mut done = 0;
        for (((path, block), hash), (((to_path, to_owners), to_name), offset)) in new {
            if offset > 0 && self.fork_filter.may_contain(*path) {
                break;
            }
            if let Some(ahead) = hashes.get(done + AHEAD) {
                names.prefetch(*ahead);
            }
            let is_alias = tree.alias(block.name).is_some();
            if is_alias || !names.insert_if_new(*hash, block_id(page, offset)) {
                break;
            }
            to_path.store(*path, Relaxed);
            to_owners.store(owner, Relaxed);
            *to_name = block.name.0;
            done += 1;
        }
        chunk.rows[page as usize % CHUNK].meta.named |= ((1 << done) - 1) << first;
        done
    }

    /// Counts new blocks of a page.
    #[inline]
    fn count_new(
        &mut self,
        tree: &mut TreeState,
        store: StoreContext,
        page: PageId,
        offsets: Range<usize>,
    ) {
        let new = offsets.len();
        self.meta_mut(page).owned += new as u32;
        self.blocks += new as u64;
        self.memberships += new as u64;
        tree.count_page(page, new);
        if store.is_default {
            tree.blocks[store.tier as usize] += new as u64;
        } else {
            for offset in offsets {
                tree.count_first_copies(store, block_id(page, offset));
            }
        }
    }
}
