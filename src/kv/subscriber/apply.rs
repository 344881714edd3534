//! Applies batches to one rank's tree: creates the tree once the block size is known, and counts the
//! events that the tree cannot take. No I/O.

use std::sync::Arc;

use super::batch_effect::BatchEffect;
use super::group_copies::GroupCopies;
use super::kept_removals::KeptRemovals;
use super::named_rank::NamedRank;
use super::page_events::PageEvents;
use super::subject::Subject;
use super::tree_target::TreeTarget;
use crate::ids::{Model, WorkerId};
use crate::kv::block::BlockShape;
use crate::kv::event::{Batch, EngineHash, Event, Tier};
use crate::kv::event_filter::{
    EventFilter, IgnoredReason, LearnedFacts, TreeChange, TreeImpact, impact_of_store,
};
use crate::kv::index::{CopyReport, Parent, Tree};
use crate::kv::indexes::PrefixIndexes;
use crate::kv::page_fold::PageFold;

pub(super) struct RankTree {
    indexes: Arc<PrefixIndexes>,
    model: Model,
    worker: WorkerId,
    rank: u32,
    pub(super) filter: EventFilter,
    kept_removals: KeptRemovals,
    groups: GroupCopies,
    tree: Option<(BlockShape, Tree)>,
    ranks: NamedRank,
    /// The index has no room for this tree, which therefore takes no blocks.
    index_is_full: bool,
    counts_in_routing: bool,
    /// Of an engine that has each page at most once in a tier.
    pub(super) pages: Option<PageEvents>,
}

impl RankTree {
    pub(super) fn new(indexes: Arc<PrefixIndexes>, subject: &Subject) -> Self {
        let pages = || PageEvents::new(indexes.clone());
        Self {
            pages: subject.caches_pages.then(pages),
            indexes,
            model: subject.model.clone(),
            worker: subject.worker,
            rank: subject.rank,
            filter: EventFilter::default(),
            kept_removals: KeptRemovals::default(),
            groups: GroupCopies::default(),
            tree: None,
            // An engine's only rank may call itself any rank of a larger group.
            ranks: NamedRank::new(subject.rank, subject.is_only_rank),
            index_is_full: false,
            counts_in_routing: false,
        }
    }

    pub(super) fn tree(&self) -> Option<&(BlockShape, Tree)> {
        self.tree.as_ref()
    }

    /// How many copies a stored block stands for.
    fn copies_of_store(&self) -> CopyReport {
        match self.pages {
            Some(_) => CopyReport::AtLeastOne,
            None => CopyReport::OneMore,
        }
    }

    /// Applies a batch. If it may have removed unknown blocks, the tree is cleared at that point and the effect's impact
    /// is [`TreeImpact::Unknown`].
    pub(super) fn apply(&mut self, batch: &Batch, effect: &mut BatchEffect) {
        if !self.ranks.is_followed(batch.rank) {
            effect.events += batch.events.len() as u64 + batch.joined;
            let ignored = batch.events.iter().map(|_| IgnoredReason::OtherRank);
            effect.ignored.extend(ignored);
            return;
        }
        let folded = self
            .pages
            .as_mut()
            .and_then(|pages| pages.read(batch, effect));
        let batch = folded.as_ref().unwrap_or(batch);
        self.kept_removals.read(batch);
        effect.events += batch.joined;
        for (at, event) in batch.events.iter().enumerate() {
            effect.events += 1;
            if matches!(event, Event::Cleared { .. }) {
                self.remove_kept(effect);
            }
            let impact = self.apply_event(at, event, effect);
            if impact == TreeImpact::Unknown {
                self.kept_removals.take();
                self.clear();
            }
            effect.impact = effect.impact.max(impact);
        }
        self.remove_kept(effect);
        if self.take_evicted() {
            effect.impact = effect.impact.max(TreeImpact::Incomplete);
        }
    }

    fn remove_kept(&mut self, effect: &mut BatchEffect) {
        for (hash, tier) in self.kept_removals.take() {
            effect.unknown_removals += match &mut self.tree {
                Some((_, tree)) => tree.remove(&[hash], tier) as u64,
                None => 1,
            };
        }
    }

    fn apply_event(&mut self, at: usize, event: &Event, effect: &mut BatchEffect) -> TreeImpact {
        let report = self.copies_of_store();
        let group = match event {
            Event::Stored(stored) => stored.location.group,
            Event::Removed(removed) => removed.location.group,
            Event::Cleared { .. } | Event::Unknown { .. } => None,
        };
        let change = match self.filter.accept(event) {
            Ok(change) => change,
            Err(ignored) => {
                effect.ignored.push(ignored.reason);
                return ignored.impact;
            }
        };
        match change {
            TreeChange::Store {
                after,
                blocks,
                tier,
                shape,
            } => {
                if self.tree.as_ref().is_none_or(|(of, _)| *of != shape) {
                    let index = self.indexes.index(&self.model, shape);
                    let mut tree = index.add_tree(self.worker, self.rank);
                    tree.set_visible(self.counts_in_routing);
                    self.tree = Some((shape, tree));
                    self.groups.clear();
                    self.index_is_full = false;
                }
                let Some((_, tree)) = &mut self.tree else {
                    return TreeImpact::None;
                };
                // Stores of one group follow each other in a batch, so its first one shows that there is such a group.
                self.groups.learn(group.unwrap_or(0), tree);
                let mut target = TreeTarget {
                    tree,
                    kept: &mut self.kept_removals,
                    tier,
                    report,
                };
                let unplaced = if self.groups.has_several() {
                    let stored = self.groups.store(group, after, blocks, &mut target);
                    if stored.dropped > 0 {
                        effect.ignored.push(IgnoredReason::IndexFull);
                        effect.impact = effect.impact.max(TreeImpact::Incomplete);
                    }
                    stored.unplaced
                } else {
                    target.store(after, blocks)
                };
                let placed = blocks.len() - unplaced;
                effect.stored += placed as u64;
                if unplaced == 0 {
                    self.filter.on_placed(shape, tier, placed);
                    return TreeImpact::None;
                }
                if tier != Tier::Gpu {
                    effect.ignored.push(IgnoredReason::UnknownCopy);
                    return TreeImpact::None;
                }
                // A first block has no parent that could be unknown, so the index refused it.
                self.index_is_full |= matches!(after, Parent::Root(_)) && placed == 0;
                let reason = if self.index_is_full {
                    IgnoredReason::IndexFull
                } else {
                    IgnoredReason::UnknownParent
                };
                effect.ignored.push(reason);
                match event {
                    Event::Stored(stored) => impact_of_store(reason, stored),
                    Event::Removed(_) | Event::Cleared { .. } | Event::Unknown { .. } => {
                        TreeImpact::Incomplete
                    }
                }
            }
            TreeChange::AddCopies { hashes, tier } => {
                let Some((shape, tree)) = &mut self.tree else {
                    effect.ignored.push(IgnoredReason::UnknownCopy);
                    return TreeImpact::None;
                };
                let mut target = TreeTarget {
                    tree,
                    kept: &mut self.kept_removals,
                    tier,
                    report,
                };
                let unknown = if self.groups.has_several() {
                    self.groups.add_copies(group, hashes, &mut target)
                } else {
                    target.add_copies(hashes)
                };
                effect.stored += (hashes.len() - unknown) as u64;
                if unknown > 0 {
                    let is_of_size = match event {
                        Event::Stored(stored) => [0, shape.size.get()].contains(&stored.block_size),
                        Event::Removed(_) | Event::Cleared { .. } | Event::Unknown { .. } => true,
                    };
                    effect.ignored.push(if is_of_size {
                        IgnoredReason::UnknownCopy
                    } else {
                        IgnoredReason::TierBlockSize
                    });
                }
                TreeImpact::None
            }
            TreeChange::Remove { hashes, tier } => {
                effect.removed += hashes.len() as u64;
                let Some((_, tree)) = &mut self.tree else {
                    effect.unknown_removals += hashes.len() as u64;
                    return TreeImpact::None;
                };
                let mut target = TreeTarget {
                    tree,
                    kept: &mut self.kept_removals,
                    tier,
                    report,
                };
                effect.unknown_removals += if self.groups.has_several() {
                    self.groups.remove(group, at, hashes, &mut target)
                } else {
                    target.remove(at, hashes)
                };
                TreeImpact::None
            }
            TreeChange::Forget { hashes, reason } => {
                effect.ignored.push(reason);
                for name in hashes {
                    self.groups.forget_block(*name);
                }
                let copies = self.tree.as_mut().map(|(_, tree)| forget(tree, hashes));
                match copies {
                    None | Some(0) => TreeImpact::None,
                    Some(_) => TreeImpact::Incomplete,
                }
            }
            TreeChange::Clear => {
                effect.cleared = true;
                effect.impact = TreeImpact::None;
                self.groups.clear();
                if let Some((_, tree)) = &mut self.tree {
                    tree.clear();
                    // What the index evicted was cleared too.
                    tree.take_evicted();
                }
                TreeImpact::None
            }
        }
    }

    /// Whether the engine's process was seen to name a page by its tokens.
    pub(super) fn has_matching_names(&self) -> bool {
        self.pages.as_ref().is_some_and(|pages| pages.has_matched)
    }

    /// Replaces the tree by an empty one for another replica's blocks, of a process about which these facts were
    /// learned.
    pub(super) fn begin_graft(
        &mut self,
        shape: BlockShape,
        learned: &LearnedFacts,
        has_matching_names: bool,
    ) {
        self.clear();
        self.filter.relearn(shape, learned);
        self.groups.relearn(&learned.groups);
        if let Some(pages) = &mut self.pages {
            pages.has_matched = has_matching_names;
        }
        if self.tree.as_ref().is_some_and(|(of, _)| *of == shape) {
            return;
        }
        let index = self.indexes.index(&self.model, shape);
        let mut tree = index.add_tree(self.worker, self.rank);
        tree.set_visible(self.counts_in_routing);
        self.tree = Some((shape, tree));
    }

    /// Of the tree, and of what is kept beside it.
    pub(super) fn memory_bytes(&self) -> usize {
        let tree = self.tree.as_ref();
        let fold = self.pages.as_ref().and_then(|pages| pages.fold.as_ref());
        tree.map_or(0, |(_, tree)| tree.memory_bytes()) + fold.map_or(0, PageFold::memory_bytes)
    }

    pub(super) fn tree_mut(&mut self) -> Option<&mut Tree> {
        self.tree.as_mut().map(|(_, tree)| tree)
    }

    /// Whether the index evicted blocks of this tree, to stay within its memory bound, since the last call.
    pub(super) fn take_evicted(&mut self) -> bool {
        self.tree
            .as_mut()
            .is_some_and(|(_, tree)| tree.take_evicted())
    }

    /// Clears the tree and what the filter learned about the engine's process.
    pub(super) fn clear(&mut self) {
        self.filter.forget();
        self.groups.forget();
        self.ranks.forget();
        if let Some(pages) = &mut self.pages {
            pages.clear();
        }
        if std::mem::take(&mut self.index_is_full) {
            // The index may have room by now; the next store asks again.
            self.tree = None;
        }
        if let Some((_, tree)) = &mut self.tree {
            tree.clear();
            // Discards the eviction flag: it is about the blocks just cleared.
            tree.take_evicted();
        }
    }

    pub(super) fn set_visible(&mut self, counts_in_routing: bool) {
        if self.counts_in_routing != counts_in_routing {
            self.counts_in_routing = counts_in_routing;
            if let Some((_, tree)) = &mut self.tree {
                tree.set_visible(counts_in_routing);
            }
        }
    }
}

/// Removes every copy in every tier, and returns how many there were.
fn forget(tree: &mut Tree, hashes: &[EngineHash]) -> usize {
    let mut copies = 0;
    for hash in hashes {
        for tier in Tier::ALL {
            while tree.remove(&[*hash], tier) == 0 {
                copies += 1;
            }
        }
    }
    copies
}
