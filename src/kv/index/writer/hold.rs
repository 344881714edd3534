//! What a tree holds of blocks that are there, and the names it knows them by.

use std::sync::atomic::Ordering::{Relaxed, Release};

use super::store::{Way, first_copies};
use super::tree::{UNKNOWN, mark_of};
use super::{Known, Writer};
use crate::kv::event::Name;
use crate::kv::index::Shared;
use crate::kv::index::holders::{Mark, NOBODY, Slot};
use crate::kv::index::names::Naming;
use crate::kv::index::pages::{BlockId, CHUNK, place_of};
use crate::kv::radix::{Copies, NewBlock};

impl Writer {
    /// A tree holds blocks of one page, from one on that is there, as long as they have these names, and
    /// the same holders, and the tree is not among them. Returns how many.
    #[inline]
    pub(super) fn hold_alike(
        &mut self,
        shared: &Shared,
        way: Way,
        block: BlockId,
        paths: &[u64],
        blocks: &[NewBlock],
    ) -> usize {
        let (page, first) = place_of(block);
        let (head, body) = shared.pages.at(page);
        let old = body.held[first].load(Relaxed);
        if old == NOBODY || self.sets.mark(&shared.sets, old, way.slot) != Mark::Absent {
            return 0;
        }
        let chunk = self.chunk(page);
        let alike = paths
            .iter()
            .zip(blocks)
            .zip(first..head.len())
            .take_while(|((path, block), at)| {
                body.paths[*at].load(Relaxed) == **path
                    && body.held[*at].load(Relaxed) == old
                    && chunk.has_name(page, *at, block.name.0)
            })
            .count();
        if alike == 0 {
            return 0;
        }
        let new = self.sets.with(&shared.sets, old, way.slot, way.mark);
        self.sets.retain(new, alike as u32);
        for held in &body.held[first..first + alike] {
            held.store(new, Release);
        }
        self.sets.release(&shared.sets, old, alike as u32);
        self.memberships += alike as u64;
        alike
    }

    /// A tree holds a block that is there. Tells whether it did not before.
    #[inline]
    pub(super) fn hold(
        &mut self,
        shared: &Shared,
        known: &mut Known,
        way: Way,
        block: BlockId,
    ) -> bool {
        let mark = self.mark(shared, way.slot, block);
        if mark == Mark::Absent {
            self.set_mark(shared, way.slot, block, way.mark);
            self.memberships += 1;
            self.first(known, way, block);
            return true;
        }
        let old = known.copies(block, mark);
        let mut new = old;
        let copies = &mut new[way.tier as usize];
        *copies = match (way.copies, *copies) {
            (Copies::Counted, known) => known.saturating_add(1),
            (Copies::Unknown, 0) => UNKNOWN,
            (Copies::Unknown, known) => known,
        };
        known.set_copies(block, old, new);
        self.set_mark(shared, way.slot, block, mark_of(new));
        false
    }

    /// Counts a block that a tree did not hold before.
    #[inline]
    pub(super) fn first(&mut self, known: &mut Known, way: Way, block: BlockId) {
        if way.is_usual {
            known.blocks[way.tier as usize] += 1;
        } else {
            known.set_copies(block, [0; 3], first_copies(way.tier, way.copies));
        }
    }

    /// Lets a tree know a block that it holds by a name; `is_new` if it did not hold it before.
    ///
    /// A tree knows a block by one name, and by a name one block. What else a name stood for is
    /// forgotten, and a block told under another name is forgotten at its first removal: both are
    /// colder than the truth can be, and never warmer.
    #[inline(never)]
    pub(super) fn name(
        &mut self,
        shared: &Shared,
        known: &mut Known,
        slot: Slot,
        block: BlockId,
        name: Name,
        is_new: bool,
    ) {
        if let Some(other) = self.resolve(shared, known, slot, name)
            && other != block
        {
            self.forget(shared, known, slot, other);
        }
        let (page, at) = place_of(block);
        let is_own = self.has_name(block, name);
        if !is_new {
            let is_same = match known.alias_of(block) {
                Some(alias) => alias == name,
                None => is_own,
            };
            if is_same {
                return;
            }
            let mark = self.mark(shared, slot, block);
            let old = known.copies(block, mark);
            let new = old.map(|copies| if copies > 0 { UNKNOWN } else { 0 });
            known.set_copies(block, old, new);
        }
        if is_own {
            known.drop_alias(block);
        } else {
            known.drop_alias(block);
            let is_unnamed = self.meta(page).named >> at & 1 == 0;
            if !is_unnamed || self.name_in_table(block, name) != Naming::Done {
                known.set_alias(block, name);
            }
        }
    }

    /// Gives a block a name in the common table.
    #[inline]
    pub(super) fn name_in_table(&mut self, block: BlockId, name: Name) -> Naming {
        let chunks = &self.chunks;
        let naming = self.names.insert(name.0, block, |block| {
            let (page, at) = place_of(block);
            chunks[page as usize / CHUNK].has_name(page, at, name.0)
        });
        if naming == Naming::Done {
            let (page, at) = place_of(block);
            let chunk = &mut self.chunks[page as usize / CHUNK];
            chunk.rows[page as usize % CHUNK].names[at] = name.0;
            chunk.rows[page as usize % CHUNK].meta.named |= 1 << at;
        }
        naming
    }
}
