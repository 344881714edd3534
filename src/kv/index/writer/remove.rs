//! Removing: one copy of each named block, or all that a tree holds; and listing what is left.

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;

use super::Known;
use super::Writer;
use super::tree::UNKNOWN;
use super::tree::mark_of;
use crate::kv::block::STRETCH;
use crate::kv::event::Name;
use crate::kv::event::Tier;
use crate::kv::index::Shared;
use crate::kv::index::holders::Mark;
use crate::kv::index::holders::Slot;
use crate::kv::index::pages::BlockId;
use crate::kv::index::pages::NONE;
use crate::kv::index::pages::PageId;
use crate::kv::index::pages::block_id;
use crate::kv::index::pages::place_of;
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
        for name in names {
            let found = self
                .is_guess(shared, &known, slot, guess, *name)
                .then_some(guess)
                .or_else(|| self.resolve(shared, &known, slot, *name));
            let Some(block) = found else {
                missing += 1;
                guess = NONE;
                continue;
            };
            let (page, at) = place_of(block);
            guess = if at > 0 {
                block - 1
            } else {
                self.meta(page).up
            };
            if run.page != page {
                self.finish(shared, &mut known, &run);
                run = Run { page, gone: 0 };
                self.unsettle(shared, page);
            }
            let is_plain = tier == Tier::Gpu && known.is_plain();
            let mark = if is_plain {
                self.mark(shared, slot, block)
            } else {
                Mark::Absent
            };
            if mark == Mark::Gpu {
                // One copy, in the GPU.
                self.set_mark(shared, slot, block, Mark::Absent);
                known.blocks[Tier::Gpu as usize] -= 1;
                known.drop_alias(block);
                run.gone += 1;
                continue;
            }
            match self.remove_copy(shared, &mut known, slot, block, tier) {
                Some(Mark::Absent) => run.gone += 1,
                Some(_) => {}
                None => missing += 1,
            }
        }
        self.finish(shared, &mut known, &run);
        self.bury();
        self.count_bytes(&mut known);
        self.trees[slot as usize] = Some(known);
        missing
    }

    #[inline]
    fn is_guess(
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
        let (page, at) = place_of(guess);
        self.meta(page).has_name(at, name.0) && self.mark(shared, slot, guess) != Mark::Absent
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
        let mut pages: Vec<PageId> = known.pages.keys().copied().collect();
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
        for page in known.pages.keys() {
            let meta = self.meta(*page);
            let (head, body) = shared.pages.at(*page);
            for at in 0..head.len().min(STRETCH) {
                let block = block_id(*page, at);
                let mark = self.mark(shared, slot, block);
                if mark == Mark::Absent {
                    continue;
                }
                let copies = known.copies(block, mark);
                listed.push(Listed {
                    name: known.alias_of(block).unwrap_or(Name(meta.names[at])),
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
