//! Removing: one copy of each named block, or all that a tree holds; and listing what is left.

use std::collections::HashMap;
use std::sync::atomic::Ordering::{Relaxed, Release};

use super::tree::{UNKNOWN, mark_of};
use super::{Known, Row, Writer};
use crate::kv::event::{Name, Tier};
use crate::kv::index::Shared;
use crate::kv::index::holders::{Mark, NOBODY, Slot};
use crate::kv::index::pages::{BlockId, CHUNK, NONE, PageId, block_id, place_of};
use crate::kv::index::simd::prefetch;
use crate::kv::radix::Listed;

/// A page that blocks are being removed from, one after the other.
struct Run {
    page: PageId,
    gone: usize,
}

impl Writer {
    /// Returns how many of the names the tree did not hold in that tier.
    pub(in crate::kv::index) fn remove(
        &mut self,
        shared: &Shared,
        slot: Slot,
        names: &[Name],
        tier: Tier,
    ) -> usize {
        let Some(mut known) = self
            .trees
            .get_mut(slot as usize)
            .and_then(|tree| tree.take())
        else {
            return names.len();
        };
        let mut missing = 0;
        // Engines remove a chain from its end, so the block before is asked for next.
        let mut guess = NONE;
        let mut run = Run {
            page: NONE,
            gone: 0,
        };
        let mut left = names;
        while let [name, rest @ ..] = left {
            let found = self
                .is_guess(shared, &known, slot, guess, *name)
                .then_some(guess)
                .or_else(|| self.resolve(shared, &known, slot, *name));
            let Some(block) = found else {
                missing += 1;
                guess = NONE;
                left = rest;
                continue;
            };
            let (page, at) = place_of(block);
            if run.page != page {
                self.finish(shared, &mut known, &run);
                run = Run { page, gone: 0 };
                self.unsettle(shared, page);
                self.prefetch_up(shared, page);
            }
            let mut alike = 0;
            if tier == Tier::Gpu && known.is_plain() && !known.has_aliases() {
                alike = self.remove_alike(shared, slot, block, left);
                known.blocks[Tier::Gpu as usize] -= alike as u64;
                run.gone += alike;
            }
            if alike == 0 {
                match self.remove_copy(shared, &mut known, slot, block, tier) {
                    Some(Mark::Absent) => run.gone += 1,
                    Some(_) => {}
                    None => missing += 1,
                }
                alike = 1;
            }
            left = &left[alike..];
            guess = match at + 1 - alike {
                0 => self.meta(page).up,
                at => block_id(page, at - 1),
            };
        }
        self.finish(shared, &mut known, &run);
        self.bury();
        self.count_bytes(&mut known);
        self.trees[slot as usize] = Some(known);
        missing
    }

    /// Removes blocks of one page from the tree, one before the other, as long as they go by these names
    /// and have the same holders. Returns how many; none if the tree does not hold the first one in
    /// the GPU. It may have no aliases, and no block of which it holds other than one copy.
    fn remove_alike(
        &mut self,
        shared: &Shared,
        slot: Slot,
        block: BlockId,
        names: &[Name],
    ) -> usize {
        let (page, last) = place_of(block);
        let (_, body) = shared.pages.at(page);
        let old = body.held[last].load(Relaxed);
        if self.sets.mark(&shared.sets, old, slot) != Mark::Gpu {
            return 0;
        }
        let new = self.sets.with(&shared.sets, old, slot, Mark::Absent);
        let chunk = &mut self.chunks[page as usize / CHUNK];
        let mut gone = 0;
        for (name, at) in names.iter().zip((0..=last).rev()) {
            let is_next = gone == 0 || chunk.has_name(page, at, name.0);
            if !is_next || body.held[at].load(Relaxed) != old {
                break;
            }
            gone += 1;
        }
        let first = last + 1 - gone;
        self.sets.retain(new, gone as u32);
        for held in &body.held[first..=last] {
            held.store(new, Release);
        }
        if new == NOBODY {
            self.blocks -= gone as u64;
            let Row { meta, names } = &mut chunk.rows[page as usize % CHUNK];
            meta.live -= gone as u32;
            for at in (first..=last).rev() {
                if meta.named >> at & 1 == 1 {
                    self.dead.push((names[at], block_id(page, at)));
                }
            }
            meta.named &= !(((1 << gone) - 1) << first);
        }
        self.sets.release(&shared.sets, old, gone as u32);
        gone
    }

    /// Asks for the page that is likely next.
    #[inline]
    fn prefetch_up(&self, shared: &Shared, page: PageId) {
        let up = self.meta(page).up;
        if up != NONE {
            let (page, at) = place_of(up);
            let (head, body) = shared.pages.at(page);
            let names = &self.chunk(page).rows[page as usize % CHUNK].names;
            prefetch(head);
            prefetch(&body.held);
            prefetch(&names[at]);
            prefetch(&names[at / 2]);
            prefetch(self.meta(page));
        }
    }

    #[inline]
    pub(super) fn is_guess(
        &self,
        shared: &Shared,
        known: &Known,
        slot: Slot,
        guess: BlockId,
        name: Name,
    ) -> bool {
        if guess == NONE || known.has_aliases() {
            return false;
        }
        self.has_name(guess, name) && self.mark(shared, slot, guess) != Mark::Absent
    }

    /// What the tree still says of the block; none if there was no copy in that tier.
    fn remove_copy(
        &mut self,
        shared: &Shared,
        known: &mut Known,
        slot: Slot,
        block: BlockId,
        tier: Tier,
    ) -> Option<Mark> {
        let mark = self.mark(shared, slot, block);
        let old = known.copies(block, mark);
        let mut new = old;
        let copies = &mut new[tier as usize];
        *copies = match *copies {
            0 => return None,
            UNKNOWN => 0,
            known => known - 1,
        };
        let left = mark_of(new);
        known.set_copies(block, old, new);
        self.set_mark(shared, slot, block, left);
        if left == Mark::Absent {
            known.drop_alias(block);
        }
        Some(left)
    }

    fn finish(&mut self, shared: &Shared, known: &mut Known, run: &Run) {
        if run.page == NONE {
            return;
        }
        known.discount_page(run.page, run.gone);
        self.memberships -= run.gone as u64;
        self.settle(shared, run.page);
    }

    /// Forgets one block of a tree, all copies of it.
    pub(super) fn forget(
        &mut self,
        shared: &Shared,
        known: &mut Known,
        slot: Slot,
        block: BlockId,
    ) {
        let (page, at) = place_of(block);
        self.forget_in_page(shared, known, slot, page, at..at + 1);
        self.bury();
    }

    /// Forgets a tree's blocks in some places of a page. Returns how many there were.
    pub(super) fn forget_in_page(
        &mut self,
        shared: &Shared,
        known: &mut Known,
        slot: Slot,
        page: PageId,
        places: std::ops::Range<usize>,
    ) -> usize {
        let mut run = Run { page, gone: 0 };
        self.unsettle(shared, page);
        for at in places {
            let block = block_id(page, at);
            let mark = self.mark(shared, slot, block);
            if mark == Mark::Absent {
                continue;
            }
            let old = known.copies(block, mark);
            known.set_copies(block, old, [0; Tier::COUNT]);
            self.set_mark(shared, slot, block, Mark::Absent);
            known.drop_alias(block);
            run.gone += 1;
        }
        self.finish(shared, known, &run);
        run.gone
    }

    /// Forgets all that a tree holds.
    pub(in crate::kv::index) fn clear(&mut self, shared: &Shared, slot: Slot) {
        let Some(mut known) = self
            .trees
            .get_mut(slot as usize)
            .and_then(|tree| tree.take())
        else {
            return;
        };
        let mut pages: Vec<PageId> = known.pages().collect();
        // So that they are handed out again in their order.
        pages.sort_unstable_by(|a, b| b.cmp(a));
        for page in pages {
            let len = shared.pages.at(page).0.len();
            self.forget_in_page(shared, &mut known, slot, page, 0..len);
            if self.dead.len() >= 64 {
                self.bury();
            }
        }
        self.bury();
        known.shrink();
        self.count_bytes(&mut known);
        self.trees[slot as usize] = Some(known);
    }

    /// All that a tree holds, parents before children.
    pub(in crate::kv::index) fn list(&self, shared: &Shared, slot: Slot) -> Vec<Listed> {
        let Some(known) = self.tree(slot) else {
            return Vec::new();
        };
        let mut listed = Vec::with_capacity(known.len as usize);
        let mut parents = Vec::with_capacity(known.len as usize);
        for page in known.pages() {
            let meta = self.meta(page);
            let names = &self.chunk(page).rows[page as usize % CHUNK].names;
            let (head, body) = shared.pages.at(page);
            for (at, name) in names.iter().enumerate().take(head.len()) {
                let block = block_id(page, at);
                let mark = self.mark(shared, slot, block);
                if mark == Mark::Absent {
                    continue;
                }
                let copies = known.copies(block, mark);
                listed.push(Listed {
                    name: known.alias_of(block).unwrap_or(Name(*name)),
                    parent: None,
                    path: body.paths[at].load(Relaxed),
                    depth: meta.depth + at as u32,
                    copies: copies.map(|copies| match copies {
                        UNKNOWN => Listed::UNKNOWN,
                        known => u32::from(known),
                    }),
                });
                parents.push(match at {
                    0 => meta.up_path,
                    at => body.paths[at - 1].load(Relaxed),
                });
            }
        }
        let names: HashMap<u64, Name> = listed
            .iter()
            .map(|block| (block.path, block.name))
            .collect();
        for (block, parent) in listed.iter_mut().zip(parents) {
            if block.depth > 0 {
                block.parent = names.get(&parent).copied();
            }
        }
        listed.sort_unstable_by_key(|block| (block.depth, block.path));
        listed
    }
}
