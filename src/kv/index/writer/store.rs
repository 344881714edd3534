//! Stores the blocks of one KV event in a tree: finds the block that they follow, evicts blocks if memory is short, and
//! places the new ones.

use hashbrown::hash_table::Entry;
use parking_lot::{RwLock, RwLockWriteGuard};
use rustc_hash::FxHashSet;
use smallvec::SmallVec;

use super::tree_state::{TreeState, UNKNOWN};
use super::{PIECE, Writer, hash_of_block, resize_starts};
use crate::kv::block::{PathHash, SEGMENT_BLOCKS};
use crate::kv::event::{EngineHash, Tier};
use crate::kv::index::pages::{BlockId, ChainEnd, Pages, Slot};
use crate::kv::index::types::{CopyReport, NewBlock, Parent, UnknownParent};

/// What an event says of each of its blocks.
#[derive(Clone, Copy)]
pub(in crate::kv::index) struct Report {
    pub(in crate::kv::index) tier: Tier,
    pub(in crate::kv::index) copies: CopyReport,
}

impl Writer {
    /// Returns how many blocks were left out, because the GPU has them under other names.
    pub(in crate::kv::index) fn store(
        &mut self,
        lock: &RwLock<Pages>,
        slot: Slot,
        parent: Parent,
        blocks: &[NewBlock],
        report: Report,
    ) -> Result<usize, UnknownParent> {
        let mut end = match parent {
            Parent::Root(root) => ChainEnd {
                path: PathHash::start(root).0,
                depth: 0,
                block: None,
            },
            Parent::Block(name) => {
                let pages = lock.read();
                let block = self.resolve(&pages, self.tree(slot), name);
                pages.end_at(block.ok_or(UnknownParent)?)
            }
        };
        self.clock += 1;
        // A chain that is continued after a long pause must not lose its end to what continues it.
        if let Some(block) = end.block {
            self.note_stored(block);
        }
        let mut misnamed = 0;
        let mut placed = 0;
        for piece in blocks.chunks(PIECE) {
            // This may evict blocks of the same tree, even the one that the new blocks follow.
            if !self.make_room(lock, slot, end, piece.len()) {
                self.dropped_blocks += (blocks.len() - placed) as u64;
                self.tree_mut(slot).was_evicted = true;
                break;
            }
            let pages = lock.read();
            self.make_room_for_names(&pages, piece);
            let larger = pages.larger_starts(piece.len());
            drop(pages);
            resize_starts(lock, larger);
            self.tree_mut(slot).reserve(piece.len());
            let mut pages = lock.write();
            misnamed += self.change(slot, |writer, tree| {
                let mut misnamed = 0;
                let mut left = piece;
                while let [block, rest @ ..] = left {
                    let new = writer.place_new(&mut pages, tree, &mut end, left, report);
                    left = &left[new..];
                    if new == 0 {
                        let is_placed = writer.place(&mut pages, tree, &mut end, block, report);
                        misnamed += usize::from(!is_placed);
                        left = rest;
                    }
                }
                misnamed
            });
            // The next piece has the room that this one left.
            self.charge(&pages);
            RwLockWriteGuard::unlock_fair(pages);
            placed += piece.len();
        }
        Ok(misnamed)
    }

    /// Makes the table of names larger before lookups have to wait for it. To look for all names first also makes the
    /// processor wait for several cache lines at the same time.
    fn make_room_for_names(&mut self, pages: &Pages, blocks: &[NewBlock]) {
        let is_new = |block: &&NewBlock| self.find_name(pages, block.name).is_none();
        let new = blocks.iter().filter(is_new).count();
        let of_block = |block: &BlockId| hash_of_block(pages, *block);
        self.names.reserve(new, of_block);
    }

    /// Adds blocks after `end`, which moves on, as long as they are new to the index, in one page, and their names are
    /// new too. Returns how many.
    fn place_new(
        &mut self,
        pages: &mut Pages,
        tree: &mut TreeState,
        end: &mut ChainEnd,
        blocks: &[NewBlock],
        report: Report,
    ) -> usize {
        if report.copies != CopyReport::OneMore {
            return 0;
        }
        let room = SEGMENT_BLOCKS - end.depth as usize % SEGMENT_BLOCKS;
        let mut new = 0u16;
        for block in blocks.iter().take(room) {
            let path = PathHash(end.path).step(block.local, end.depth).0;
            if tree.alias(block.name).is_some() || pages.find_after(end, path).is_some() {
                break;
            }
            let Entry::Vacant(entry) = self.entry(pages, block.name) else {
                break;
            };
            let added = pages.add(end, path);
            pages
                .get_mut(added.page())
                .set_name(added.offset(), block.name);
            entry.insert(added);
            new |= added.bit();
            *end = ChainEnd {
                path,
                depth: end.depth + 1,
                block: Some(added),
            };
        }
        let count = new.count_ones();
        if let Some(last) = end.block.filter(|_| count > 0) {
            tree.blocks[report.tier as usize] += u64::from(count);
            self.add_owner(pages, tree, last.page(), new, report.tier);
            self.note_stored(last);
        }
        count as usize
    }

    /// Adds one copy of a block after `end`, which moves on. Returns false for a copy in a lower tier, under a name of
    /// its own, of a block that the tree has in the GPU: a tree knows a block by one name, and the GPU's is the one
    /// that counts, because later stores refer to it.
    fn place(
        &mut self,
        pages: &mut Pages,
        tree: &mut TreeState,
        end: &mut ChainEnd,
        new: &NewBlock,
        report: Report,
    ) -> bool {
        let path = PathHash(end.path).step(new.local, end.depth).0;
        let mut found = pages.find_after(end, path);
        let mut is_placed = true;
        if report.tier != Tier::Gpu
            && let Some(block) = found
            && self.copies(pages, tree, block)[Tier::Gpu as usize] > 0
            && Self::name_of(pages, tree, block) != Some(new.name)
        {
            is_placed = false;
        } else {
            let mut of_name = self.find_name(pages, new.name);
            if let Some(other) = Self::resolve_with(pages, tree, new.name, || of_name)
                && Some(other) != found
            {
                self.set_copies(pages, tree, other, [0; Tier::COUNT]);
                found = pages.find_after(end, path);
                of_name = self.find_name(pages, new.name);
            }
            let block = found.unwrap_or_else(|| pages.add(end, path));
            found = Some(block);
            self.note_stored(block);
            self.add_named_copy(pages, tree, block, (new.name, of_name), report);
        }
        *end = ChainEnd {
            path,
            depth: end.depth + 1,
            block: found,
        };
        is_placed
    }

    fn note_stored(&mut self, block: BlockId) {
        let page = block.page() as usize;
        if page >= self.stored_at.len() {
            self.stored_at.resize(page + 1, 0);
        }
        self.stored_at[page] = self.clock;
    }

    /// The name by which a tree that owns a block knows it.
    pub(super) fn name_of(pages: &Pages, tree: &TreeState, block: BlockId) -> Option<EngineHash> {
        let alias = tree.alias_of(block);
        alias.or_else(|| pages.get(block.page()).name(block.offset()))
    }

    /// Adds one copy of a block under a name, which the table of names has for `of_name`.
    ///
    /// A tree knows a block by one name, and one block by a name. So of a block reported under a second name only the
    /// tier of that report counts, until its first removal: removals of the other copies may use the name that is no
    /// longer known. All this makes the tree colder than the engine's cache, never warmer.
    fn add_named_copy(
        &mut self,
        pages: &mut Pages,
        tree: &mut TreeState,
        block: BlockId,
        (name, of_name): (EngineHash, Option<BlockId>),
        report: Report,
    ) {
        let is_new = !self.add_copy(pages, tree, block, report);
        if !is_new {
            if Self::name_of(pages, tree, block) == Some(name) {
                return;
            }
            let tier = report.tier as usize;
            let mut copies = [0; Tier::COUNT];
            // One copy is that of this report, which was just counted; more include some under the other name.
            copies[tier] = match self.copies(pages, tree, block)[tier] {
                1 => 1,
                _ => UNKNOWN,
            };
            self.set_copies(pages, tree, block, copies);
            tree.drop_alias(block);
        }
        let known = pages.get(block.page()).name(block.offset());
        if known == Some(name) {
            return;
        }
        if known.is_some() || of_name.is_some() {
            tree.set_alias(block, name);
            return;
        }
        if let Entry::Vacant(entry) = self.entry(pages, name) {
            entry.insert(block);
        }
        pages.get_mut(block.page()).set_name(block.offset(), name);
    }

    /// Returns whether the tree owned the block before.
    fn add_copy(
        &mut self,
        pages: &mut Pages,
        tree: &mut TreeState,
        block: BlockId,
        report: Report,
    ) -> bool {
        let page = pages.get(block.page());
        let residency = page.residency(tree.slot, block.offset());
        if residency.is_none() && report.copies == CopyReport::OneMore {
            tree.blocks[report.tier as usize] += 1;
            self.add_owner(pages, tree, block.page(), block.bit(), report.tier);
            return false;
        }
        let mut new = tree.copies(block, residency);
        let copies = &mut new[report.tier as usize];
        *copies = match (report.copies, *copies) {
            (CopyReport::OneMore, count) => count.saturating_add(1),
            (CopyReport::AtLeastOne, 0) => UNKNOWN,
            (CopyReport::AtLeastOne, count) => count,
        };
        self.set_copies(pages, tree, block, new);
        residency.is_some()
    }

    /// Stores blocks in a lower tier: one more copy of each that the tree knows by its name, wherever the event puts
    /// it; the others follow the block before them. Engines report blocks so that they copy to a lower tier, often
    /// without their tokens or extra keys. Returns how many could not be placed, or are known by another name.
    pub(in crate::kv::index) fn store_lower(
        &mut self,
        lock: &RwLock<Pages>,
        slot: Slot,
        parent: Parent,
        blocks: &[NewBlock],
        report: Report,
    ) -> usize {
        let mut left_out = 0;
        let mut after = parent;
        let mut left = blocks;
        while !left.is_empty() {
            let is_known = |block: &NewBlock, pages: &Pages| {
                let found = self.resolve(pages, self.tree(slot), block.name);
                found.is_some()
            };
            let pages = lock.read();
            let known = left.iter().take_while(|block| is_known(block, &pages));
            let known = known.count();
            // A name that comes again in the same event is known by then.
            let mut names = FxHashSet::default();
            let new = left[known..]
                .iter()
                .take_while(|block| !is_known(block, &pages) && names.insert(block.name));
            let (run, rest) = left.split_at(known + new.count());
            drop(pages);
            let (known, new) = run.split_at(known);
            let names = known.iter().map(|block| block.name);
            self.add_copies(lock, slot, names, report);
            if let Some(last) = known.last() {
                after = Parent::Block(last.name);
            }
            if let Some(last) = new.last() {
                let stored = self.store(lock, slot, after, new, report);
                left_out += stored.unwrap_or(new.len());
                after = Parent::Block(last.name);
            }
            left = rest;
        }
        left_out
    }

    /// Adds one copy of each block that the tree knows by its name. Returns how many it does not know.
    pub(in crate::kv::index) fn add_copies(
        &mut self,
        lock: &RwLock<Pages>,
        slot: Slot,
        mut names: impl Iterator<Item = EngineHash>,
        report: Report,
    ) -> usize {
        let mut unknown = 0;
        loop {
            let piece: SmallVec<[_; PIECE]> = names.by_ref().take(PIECE).collect();
            if piece.is_empty() {
                return unknown;
            }
            self.tree_mut(slot).reserve(piece.len());
            let mut pages = lock.write();
            self.change(slot, |writer, tree| {
                for name in piece {
                    match writer.resolve(&pages, tree, name) {
                        Some(block) => _ = writer.add_copy(&mut pages, tree, block, report),
                        None => unknown += 1,
                    }
                }
            });
            RwLockWriteGuard::unlock_fair(pages);
        }
    }
}
