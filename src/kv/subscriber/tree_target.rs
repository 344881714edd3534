//! What one event does to a tree while some removals of its batch wait for the batch's end. No I/O.

use super::kept_removals::KeptRemovals;
use crate::kv::event::{EngineHash, Tier};
use crate::kv::index::{CopyReport, NewBlock, Parent, Tree};

pub(super) struct TreeTarget<'a> {
    pub(super) tree: &'a mut Tree,
    pub(super) kept: &'a mut KeptRemovals,
    pub(super) tier: Tier,
    /// How stores count.
    pub(super) report: CopyReport,
}

impl TreeTarget<'_> {
    /// The copies of a block that are left when the waiting removals are carried out.
    pub(super) fn copies(&self, name: EngineHash) -> u32 {
        let copies = self.tree.copies(name, self.tier);
        copies.saturating_sub(self.kept.waiting(name, self.tier))
    }

    /// Stores blocks, and returns how many could not be placed.
    pub(super) fn store(&mut self, after: Parent, blocks: &[NewBlock]) -> usize {
        let (tier, report) = (self.tier, self.report);
        let unplaced = match tier {
            Tier::Gpu => match self.tree.store(after, blocks, tier, report) {
                Ok(()) => 0,
                Err(_) => blocks.len(),
            },
            Tier::Cpu | Tier::Disk => self.tree.store_lower(after, blocks, tier, report),
        };
        self.cancel_removals(blocks.iter().map(|block| block.name));
        unplaced
    }

    /// Adds copies of blocks that the tree knows, and returns how many it does not know.
    pub(super) fn add_copies(&mut self, names: &[EngineHash]) -> usize {
        let unknown = self.tree.add_copies(names, self.tier, self.report);
        self.cancel_removals(names.iter().copied());
        unknown
    }

    /// At least one copy of these blocks counts. Where waiting removals would take all that is counted, one of them is
    /// void: it came before the store.
    fn cancel_removals(&mut self, names: impl Iterator<Item = EngineHash>) {
        if self.report != CopyReport::AtLeastOne || !self.kept.is_any_waiting() {
            return;
        }
        for name in names {
            let waiting = self.kept.waiting(name, self.tier);
            if waiting > 0 && self.tree.copies(name, self.tier) <= waiting {
                self.kept.cancel(name, self.tier);
            }
        }
    }

    /// Removes one copy of each block now, except of those that the batch stores again after the event at `at`: they
    /// wait. Returns how many blocks have no copy in that tier.
    pub(super) fn remove(&mut self, at: usize, hashes: &[EngineHash]) -> u64 {
        let tier = self.tier;
        if self.kept.is_empty() {
            return self.tree.remove(hashes, tier) as u64;
        }
        let mut missing = 0;
        let mut left = hashes;
        while !left.is_empty() {
            let run = left
                .iter()
                .take_while(|hash| !self.kept.is_stored_after(**hash, at));
            let (now, rest) = left.split_at(run.count());
            missing += self.tree.remove(now, tier) as u64;
            left = rest;
            if let [later, rest @ ..] = rest {
                let has_copy =
                    self.tree.count_copy_to_remove(*later, tier) && self.copies(*later) > 0;
                if has_copy {
                    self.kept.keep(*later, tier);
                } else {
                    missing += 1;
                }
                left = rest;
            }
        }
        missing
    }
}
