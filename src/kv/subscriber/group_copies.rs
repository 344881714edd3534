//! Copies of blocks by cache group. An engine whose layers need several caches of full attention stores each block once in
//! each of them, under the same name, and reuses it only while all of them have it. So the tree has as many copies of a
//! block as the group that has the fewest, and what the other groups have beyond that is counted here. Most engines have one
//! such group, for which nothing is counted. No I/O.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::tree_target::TreeTarget;
use crate::kv::event::{EngineHash, Tier};
use crate::kv::index::{CopyReport, NewBlock, Parent, Tree, TreeBlock};

/// Blocks of which the groups have different numbers of copies. They are as many as one scheduler step stores, unless the
/// groups lose blocks at different times.
const MAX_BLOCKS: usize = 1 << 20;

/// The table for so many blocks is kept when it is empty: each step fills and empties it.
const KEPT_BLOCKS: usize = 4_096;

/// Copies by group, in the order of [`GroupCopies::groups`]; of groups that came later there are none.
type ByGroup = SmallVec<[u16; 4]>;

#[derive(Debug, Default)]
pub(super) struct GroupCopies {
    /// Groups whose blocks count.
    groups: SmallVec<[u32; 2]>,
    /// What each group has of a block beyond the tree's copies.
    more: FxHashMap<(EngineHash, Tier), ByGroup>,
}

/// What came of a store.
#[derive(Debug, Default)]
pub(super) struct Stored {
    /// Blocks that could not be placed, since the tree does not have the block before them.
    pub(super) unplaced: usize,
    /// Blocks that are not counted, because too many are.
    pub(super) dropped: usize,
}

impl GroupCopies {
    /// The engine's process may be another one.
    pub(super) fn forget(&mut self) {
        self.groups.clear();
        self.clear();
    }

    /// Another replica learned these groups from the same process.
    pub(super) fn relearn(&mut self, groups: &[(u32, bool)]) {
        self.forget();
        let kept = groups.iter().filter(|(_, is_kept)| *is_kept);
        self.groups.extend(kept.map(|(group, _)| *group));
    }

    pub(super) fn clear(&mut self) {
        self.more.clear();
        self.shrink();
    }

    /// Gives memory back if most of it is unused. When an engine's second group begins, all blocks of the first one
    /// wait for it.
    fn shrink(&mut self) {
        if self.more.capacity() > KEPT_BLOCKS * 2 + self.more.len() * 4 {
            self.more.shrink_to(KEPT_BLOCKS + self.more.len() * 2);
        }
    }

    pub(super) fn has_several(&self) -> bool {
        self.groups.len() > 1
    }

    /// A group stores blocks, maybe its first. What the tree has then is of the groups before it, and cannot be reused
    /// without the new one.
    pub(super) fn learn(&mut self, group: u32, tree: &mut Tree) {
        if self.groups.contains(&group) {
            return;
        }
        self.groups.push(group);
        let before = self.groups.len() - 1;
        if before == 0 {
            return;
        }
        for block in tree.list() {
            for (tier, copies) in Tier::ALL.into_iter().zip(block.copies) {
                let copies = match copies {
                    0 => continue,
                    TreeBlock::UNKNOWN_COPIES => 1,
                    copies => u16::try_from(copies).unwrap_or(u16::MAX),
                };
                if self.more.len() < MAX_BLOCKS {
                    let more = self.more.entry((block.name, tier)).or_default();
                    more.resize(before, 0);
                    for of_group in more.iter_mut() {
                        *of_group = of_group.saturating_add(copies);
                    }
                }
            }
        }
        tree.clear();
    }

    /// A group stores blocks; all groups do if the event names none. Those that all groups have now go into the tree.
    pub(super) fn store(
        &mut self,
        group: Option<u32>,
        after: Parent,
        blocks: &[NewBlock],
        target: &mut TreeTarget,
    ) -> Stored {
        let mut stored = Stored::default();
        let mut after = after;
        let mut left = blocks;
        while !left.is_empty() {
            let mut run = 0;
            let mut is_in_all = None;
            for block in left {
                is_in_all = self.add(group, block.name, target);
                if is_in_all != Some(true) {
                    break;
                }
                run += 1;
            }
            let (whole, rest) = left.split_at(run);
            if let Some(last) = whole.last() {
                let unplaced = target.store(after, whole);
                if unplaced == whole.len() {
                    // All groups have them, and the tree does not: the next store of one of them tries again.
                    for block in whole {
                        self.give_back(block.name, target.tier);
                    }
                }
                stored.unplaced += unplaced;
                after = Parent::Block(last.name);
            }
            left = rest;
            if let [not_in_all, rest @ ..] = rest {
                stored.dropped += usize::from(is_in_all.is_none());
                after = Parent::Block(not_in_all.name);
                left = rest;
            }
        }
        self.shrink();
        stored
    }

    /// A group has one more copy of each block that the tree knows. Returns how many it does not know.
    pub(super) fn add_copies(
        &mut self,
        group: Option<u32>,
        names: &[EngineHash],
        target: &mut TreeTarget,
    ) -> usize {
        let mut unknown = 0;
        for name in names {
            if self.add(group, *name, target) == Some(true) {
                unknown += target.add_copies(&[*name]);
            }
        }
        unknown
    }

    /// Counts a copy. Returns whether all groups have one more now, so that the tree has; `None` if it is not counted.
    fn add(&mut self, group: Option<u32>, name: EngineHash, target: &TreeTarget) -> Option<bool> {
        let groups = self.groups.len();
        let position = group.and_then(|group| self.groups.iter().position(|known| *known == group));
        let key = (name, target.tier);
        if self.more.len() >= MAX_BLOCKS && !self.more.contains_key(&key) {
            return None;
        }
        let is_in_tree = target.report == CopyReport::AtLeastOne && target.copies(name) > 0;
        let more = self.more.entry(key).or_default();
        more.resize(groups, 0);
        for (at, of_group) in more.iter_mut().enumerate() {
            let is_known = target.report == CopyReport::AtLeastOne && *of_group > 0 || is_in_tree;
            if position.is_none_or(|position| position == at) && !is_known {
                *of_group = of_group.saturating_add(1);
            }
        }
        let is_in_all = more.iter().all(|of_group| *of_group > 0);
        if is_in_all {
            more.iter_mut().for_each(|of_group| *of_group -= 1);
        }
        if more.iter().all(|of_group| *of_group == 0) {
            self.more.remove(&key);
        }
        Some(is_in_all)
    }

    /// A group loses a copy of each block; all groups do if the event names none. Returns how many of the blocks had none.
    pub(super) fn remove(
        &mut self,
        group: Option<u32>,
        at: usize,
        names: &[EngineHash],
        target: &mut TreeTarget,
    ) -> u64 {
        let mut missing = 0;
        for name in names {
            let Some(group) = group else {
                if target.copies(*name) > 0 {
                    missing += target.remove(at, &[*name]);
                } else {
                    let groups = self.groups.clone();
                    let had = groups
                        .iter()
                        .filter(|group| self.take(**group, *name, target.tier));
                    missing += u64::from(had.count() == 0);
                }
                continue;
            };
            if self.take(group, *name, target.tier) {
                continue;
            }
            match target.remove(at, &[*name]) {
                0 => self.on_tree_lost(group, *name, target.tier),
                _ => missing += 1,
            }
        }
        self.shrink();
        missing
    }

    /// Takes a copy that a group has beyond those of the tree. Returns whether there was one.
    fn take(&mut self, group: u32, name: EngineHash, tier: Tier) -> bool {
        let position = self.groups.iter().position(|known| *known == group);
        let Some(more) = self.more.get_mut(&(name, tier)) else {
            return false;
        };
        match position.and_then(|position| more.get_mut(position)) {
            Some(of_group) if *of_group > 0 => *of_group -= 1,
            Some(_) | None => return false,
        }
        if more.iter().all(|of_group| *of_group == 0) {
            self.more.remove(&(name, tier));
        }
        true
    }

    fn give_back(&mut self, name: EngineHash, tier: Tier) -> &mut ByGroup {
        let groups = self.groups.len();
        let more = self.more.entry((name, tier)).or_default();
        more.resize(groups, 0);
        for of_group in more.iter_mut() {
            *of_group = of_group.saturating_add(1);
        }
        more
    }

    /// The tree lost a copy because this group did: the others still have theirs.
    fn on_tree_lost(&mut self, group: u32, name: EngineHash, tier: Tier) {
        if self.more.len() >= MAX_BLOCKS {
            return;
        }
        let Some(position) = self.groups.iter().position(|known| *known == group) else {
            return;
        };
        self.give_back(name, tier)[position] -= 1;
    }

    /// It is unknown which copies are gone.
    pub(super) fn forget_block(&mut self, name: EngineHash) {
        for tier in Tier::ALL {
            self.more.remove(&(name, tier));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::super::kept_removals::KeptRemovals;
    use super::*;
    use crate::ids::WorkerId;
    use crate::kv::block::{ChainRoot, LocalHash};
    use crate::kv::indexes::{PrefixIndexes, Settings};
    use crate::observe::metrics::Registry;

    #[test]
    fn what_waited_for_an_engines_second_group_leaves_no_memory_behind() {
        let indexes = PrefixIndexes::new(Settings::default(), &Registry::default());
        let size = NonZeroU32::new(16).unwrap();
        let mut tree = indexes.index(&"m".into(), size).add_tree(WorkerId(1), 0);
        let mut kept = KeptRemovals::default();
        let new = |at| NewBlock {
            name: EngineHash(at),
            local: LocalHash(at + 1),
        };
        let blocks: Vec<NewBlock> = (0..100_000).map(new).collect();
        let root = Parent::Root(ChainRoot(1));
        let mut groups = GroupCopies::default();
        groups.learn(0, &mut tree);
        let mut target = TreeTarget {
            tree: &mut tree,
            kept: &mut kept,
            tier: Tier::Gpu,
            report: CopyReport::OneMore,
        };
        assert_eq!(target.store(root, &blocks), 0);
        groups.learn(1, target.tree);
        assert!(target.tree.is_empty());
        assert!(groups.more.capacity() >= 100_000);
        groups.store(Some(1), root, &blocks, &mut target);
        assert_eq!(target.tree.len(), 100_000);
        assert!(groups.more.is_empty());
        assert!(groups.more.capacity() < 4 * KEPT_BLOCKS);
        // What one step stores, and its other group after it, needs no other table.
        let capacity = groups.more.capacity();
        let step = &blocks[..1_000];
        for group in [0, 1] {
            groups.store(Some(group), root, step, &mut target);
            assert_eq!(groups.more.capacity(), capacity);
        }
        groups.learn(2, target.tree);
        groups.clear();
        assert!(groups.more.capacity() < 4 * KEPT_BLOCKS);
    }
}
