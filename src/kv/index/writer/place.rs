//! Places consecutive blocks of a chain in pages: first blocks that the index has, then new ones.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use super::Writer;
use super::copies::StoreContext;
use super::page_alloc::is_segment_start;
use super::tree_state::TreeState;
use crate::kv::block::{PathHash, SEGMENT_BLOCKS};
use crate::kv::index::name_table::Insert;
use crate::kv::index::owner_sets::{SetId, sole_owner};
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
        for block in blocks.iter().take(AHEAD) {
            self.names.prefetch(block.name.0);
        }
        let mut paths = std::mem::take(&mut self.paths);
        paths.clear();
        let (mut path, before) = (PathHash(end.path), end.path);
        paths.extend(blocks.iter().zip(end.depth..).map(|(block, depth)| {
            path = path.step(block.local, depth);
            path.0
        }));
        let start = end.depth;
        let to_segment = (SEGMENT_BLOCKS - start as usize % SEGMENT_BLOCKS) % SEGMENT_BLOCKS;
        for path in paths.iter().skip(to_segment).step_by(SEGMENT_BLOCKS) {
            self.starts.table.prefetch(PathHash(*path).mixed());
        }
        let owner = sole_owner(store.slot, store.residency);
        let mut placed = 0;
        // The page and the offset in it where the next block goes, if known.
        let mut next = (NO_ID, 0);
        if end.block != NO_ID && !is_segment_start(end.depth) {
            let (page, offset) = locate(end.block);
            next = (page, offset + 1);
        }
        while placed < blocks.len() {
            let depth = start + placed as u32;
            if next.0 == NO_ID {
                let parent = match is_segment_start(depth) {
                    true => end.block,
                    false => NO_ID,
                };
                let guess = self.page_after(shared, parent, paths[placed]);
                let found = guess
                    .or_else(|| self.page_of(shared, paths[placed], depth))
                    .or_else(|| {
                        let parent_path = placed.checked_sub(1).map_or(before, |last| paths[last]);
                        self.new_page(shared, paths[placed], depth, end.block, parent_path)
                    });
                let Some(page) = found else {
                    break;
                };
                if is_segment_start(depth) {
                    let before = &mut end.trail[depth as usize / SEGMENT_BLOCKS % LOOKAHEAD];
                    if let Some((_, far)) = shared.pages.ahead(std::mem::replace(before, page)) {
                        far.store(page, Relaxed);
                    }
                }
                if guess.is_none() && parent != NO_ID {
                    let (parent, _) = locate(parent);
                    shared.pages.get(parent).0.next.store(page, Relaxed);
                }
                self.meta_mut(page).parent = end.block;
                next = (page, 0);
            }
            let (page, mut offset) = next;
            let (head, body) = shared.pages.get(page);
            let clock = self.clock;
            let meta = self.meta_mut(page);
            meta.stored_at = clock;
            let room = SEGMENT_BLOCKS - meta.depth as usize % SEGMENT_BLOCKS;
            self.invalidate(shared, page);
            // Blocks that the page has already.
            let mut added = 0;
            while placed < blocks.len()
                && offset < head.len()
                && body.paths[offset].load(Relaxed) == paths[placed]
            {
                let block = block_id(page, offset);
                let run = match store.is_default && !tree.has_aliases() {
                    true => self.add_owner_to_run(
                        shared,
                        store,
                        block,
                        &paths[placed..],
                        &blocks[placed..],
                    ),
                    false => 0,
                };
                if run > 0 {
                    tree.blocks[store.tier as usize] += run as u64;
                    added += run;
                    offset += run;
                    placed += run;
                    end.block = block_id(page, offset - 1);
                    continue;
                }
                let is_new = self.add_owner(shared, tree, store, block);
                added += usize::from(is_new);
                let name = blocks[placed].name;
                if !self.has_name(block, name) || tree.has_aliases() {
                    // The new name may make the tree forget other blocks of this page, not this one.
                    tree.count_page(page, std::mem::take(&mut added));
                    self.set_name(shared, tree, store.slot, block, name, is_new);
                    self.invalidate(shared, page);
                }
                end.block = block;
                offset += 1;
                placed += 1;
            }
            tree.count_page(page, added);
            next = (NO_ID, 0);
            // New blocks after the page's last one.
            if offset == head.len() && offset < room && placed < blocks.len() {
                let from = placed;
                let fits = (room - offset).min(blocks.len() - placed);
                head.prepare_append();
                while placed - from < fits {
                    if !tree.has_aliases() {
                        let fits = fits - (placed - from);
                        let new = self.append(
                            page,
                            offset,
                            owner,
                            body,
                            &paths[placed..placed + fits],
                            &blocks[placed..],
                        );
                        offset += new;
                        placed += new;
                        if new > 0 {
                            end.block = block_id(page, offset - 1);
                        }
                        if new == fits {
                            break;
                        }
                    }
                    if offset > 0
                        && let Some(fork) =
                            self.page_of(shared, paths[placed], start + placed as u32)
                    {
                        next = (fork, 0);
                        break;
                    }
                    let name = blocks[placed].name;
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
                    body.paths[offset].store(paths[placed], Relaxed);
                    body.owners[offset].store(owner, Relaxed);
                    end.block = block_id(page, offset);
                    offset += 1;
                    placed += 1;
                }
                head.open();
                if offset > 0 {
                    head.last
                        .store(body.paths[offset - 1].load(Relaxed), Relaxed);
                }
                head.close(offset);
                self.count_new(tree, store, page, offset - (placed - from)..offset);
                if next.0 == NO_ID && placed - from < fits {
                    next = self.evict_conflict(shared, tree, store, page, offset, &blocks[placed]);
                    if next.0 == page {
                        continue;
                    }
                }
            }
            if self.meta(page).owned > 0 {
                self.refresh(shared, page);
            }
        }
        end.path = placed.checked_sub(1).map_or(end.path, |last| paths[last]);
        end.depth = start + placed as u32;
        self.paths = paths;
        placed
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

    /// Appends blocks to a page as long as they are plainly new: no fork can begin with their path, and
    /// no name in the table has the same hash. Returns how many.
    #[inline]
    fn append(
        &mut self,
        page: PageId,
        first: usize,
        owner: SetId,
        body: &Body,
        paths: &[u64],
        blocks: &[NewBlock],
    ) -> usize {
        let Self { names, chunks, .. } = self;
        let chunk = &mut chunks[page as usize / CHUNK];
        let targets = body.paths[first..].iter().zip(&body.owners[first..]);
        let targets = targets
            .zip(&mut chunk.rows[page as usize % CHUNK].names[first..])
            .zip(first..);
        let new = paths.iter().zip(blocks).zip(targets);
        let mut done = 0;
        for ((path, block), (((to_path, to_owners), to_name), offset)) in new {
            if offset > 0 && self.fork_filter.may_contain(*path) {
                break;
            }
            if let Some(ahead) = blocks.get(done + AHEAD) {
                names.prefetch(ahead.name.0);
            }
            if !names.insert_if_new(block.name.0, block_id(page, offset)) {
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
