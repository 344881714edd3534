//! Stores the blocks of one KV event in a tree: finds the block that they follow, evicts blocks if memory is short, and
//! places the new ones.

use std::sync::atomic::Ordering::Relaxed;

use super::Writer;
use super::copies::StoreContext;
use super::place::ChainEnd;
use crate::kv::block::{PathHash, SEGMENT_BLOCKS};
use crate::kv::event::Tier;
use crate::kv::index::name_table::NameHash;
use crate::kv::index::owner_sets::{Residency, Slot};
use crate::kv::index::pages::{LOOKAHEAD, NO_ID, PageId, locate};
use crate::kv::index::shared::Shared;
use crate::kv::index::types::{CopyReport, NewBlock, Parent, UnknownParent};

/// Blocks that are placed at once. A longer event is placed in several pieces.
const PIECE: usize = 256;

/// For fewer blocks, following the chain back for [`Writer::trail`] costs more than it saves.
const MIN_TRAIL: usize = 64;

impl Writer {
    pub(in crate::kv::index) fn store(
        &mut self,
        shared: &Shared,
        slot: Slot,
        parent: Parent,
        blocks: &[NewBlock],
        tier: Tier,
        copies: CopyReport,
    ) -> Result<(), UnknownParent> {
        let tree = self.tree(slot).ok_or(UnknownParent)?;
        tree.prefetch();
        let mut end = match parent {
            Parent::Root(root) => ChainEnd {
                path: PathHash::start(root).0,
                depth: 0,
                block: NO_ID,
                trail: [NO_ID; LOOKAHEAD],
            },
            Parent::Block(name) => {
                // The first block's entry is read next. Both entries are likely not in the CPU cache.
                if let Some(first) = blocks.first() {
                    self.names.prefetch(NameHash::of(first.name.0));
                }
                let guess = tree.chain_end(name);
                if guess != NO_ID {
                    self.prefetch_block(shared, guess);
                }
                let block = self
                    .is_block_named(shared, tree, slot, guess, name)
                    .then_some(guess)
                    .or_else(|| self.resolve(shared, tree, slot, name))
                    .ok_or(UnknownParent)?;
                let (page, offset) = locate(block);
                ChainEnd {
                    path: shared.pages.get(page).1.paths[offset].load(Relaxed),
                    depth: self.meta(page).depth + offset as u32 + 1,
                    block,
                    trail: match blocks.len() {
                        0..MIN_TRAIL => [NO_ID; LOOKAHEAD],
                        _ => self.trail(page),
                    },
                }
            }
        };
        let store = StoreContext::new(slot, tier, copies);
        self.clock += 1;
        let mut left = blocks;
        while !left.is_empty() {
            let (piece, rest) = left.split_at(left.len().min(PIECE));
            // This may evict blocks of the same tree, even the one that the new blocks follow.
            let has_evicted = self.make_room(shared, piece.len());
            if has_evicted && end.block != NO_ID && !self.owns_end(shared, slot, end) {
                self.drop_rest(slot, left.len());
                return Ok(());
            }
            let Some(mut tree) = self.take_tree(slot) else {
                return Ok(());
            };
            let placed = self.place(shared, &mut tree, store, &mut end, piece);
            self.put_back(slot, tree);
            if placed < piece.len() {
                self.drop_rest(slot, left.len() - placed);
                return Ok(());
            }
            left = rest;
        }
        if let (Some(last), Some(tree)) = (blocks.last(), self.tree_mut(slot)) {
            tree.set_chain_end(last.name, end.block);
        }
        Ok(())
    }

    /// The pages of the last [`LOOKAHEAD`] segments of the chain that ends in `page`. They are guesses, which readers
    /// verify: a page may have been reused since.
    fn trail(&self, mut page: PageId) -> [PageId; LOOKAHEAD] {
        let mut trail = [NO_ID; LOOKAHEAD];
        for _ in 0..LOOKAHEAD {
            let meta = self.meta(page);
            trail[meta.depth as usize / SEGMENT_BLOCKS % LOOKAHEAD] = page;
            if meta.parent == NO_ID {
                break;
            }
            (page, _) = locate(meta.parent);
        }
        trail
    }

    /// Whether the tree still owns the block that the new blocks follow.
    fn owns_end(&self, shared: &Shared, slot: Slot, end: ChainEnd) -> bool {
        let (page, offset) = locate(end.block);
        let (head, body) = shared.pages.get(page);
        offset < head.len()
            && body.paths[offset].load(Relaxed) == end.path
            && self.residency(shared, slot, end.block) != Residency::Absent
    }

    /// Counts blocks that are not stored because memory is short, and marks the tree as incomplete.
    fn drop_rest(&mut self, slot: Slot, blocks: usize) {
        self.dropped_blocks += blocks as u64;
        if let Some(tree) = self.tree_mut(slot) {
            tree.was_evicted = true;
        }
    }
}
