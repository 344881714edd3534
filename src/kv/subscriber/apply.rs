//! Applies batches to one rank's tree: creates the tree once the block size is known, and counts the
//! events that the tree cannot take. No I/O.

use std::sync::Arc;

use super::batch_effect::BatchEffect;
use super::kept_removals::KeptRemovals;
use super::page_events::PageEvents;
use crate::ids::{Model, WorkerId};
use crate::kv::block::BlockShape;
use crate::kv::event::{Batch, EngineHash, Event, Tier};
use crate::kv::event_filter::{
    EventFilter, IgnoredReason, LearnedFacts, TreeChange, TreeImpact, impact_of_store,
};
use crate::kv::index::{CopyReport, Parent, Tree};
use crate::kv::indexes::PrefixIndexes;

pub(super) struct RankTree {
    indexes: Arc<PrefixIndexes>,
    model: Model,
    worker: WorkerId,
    rank: u32,
    filter: EventFilter,
    kept_removals: KeptRemovals,
    tree: Option<(BlockShape, Tree)>,
    /// The index has no room for this tree, which therefore takes no blocks.
    index_is_full: bool,
    counts_in_routing: bool,
    /// Of an engine that has each page at most once in a tier.
    pages: Option<PageEvents>,
}

impl RankTree {
    pub(super) fn new(
        indexes: Arc<PrefixIndexes>,
        model: Model,
        worker: WorkerId,
        rank: u32,
    ) -> Self {
        Self {
            indexes,
            model,
            worker,
            rank,
            filter: EventFilter::default(),
            kept_removals: KeptRemovals::default(),
            tree: None,
            index_is_full: false,
            counts_in_routing: false,
            pages: None,
        }
    }

    /// The tree of an engine that caches pages in a radix tree.
    pub(super) fn of_pages(self) -> Self {
        let pages = Some(PageEvents::default());
        Self { pages, ..self }
    }

    pub(super) fn tree(&self) -> Option<&(BlockShape, Tree)> {
        self.tree.as_ref()
    }

    /// Applies a batch. `copies` says how to count stores that begin at a prompt's first block. If the
    /// batch may have removed unknown blocks, the tree is cleared at that point and the effect's impact
    /// is [`TreeImpact::Unknown`].
    pub(super) fn apply(&mut self, batch: &Batch, copies: CopyReport, effect: &mut BatchEffect) {
        let folded = self
            .pages
            .as_mut()
            .and_then(|pages| pages.read(batch, effect));
        let batch = folded.as_ref().unwrap_or(batch);
        let copies = match self.pages {
            Some(_) => CopyReport::AtLeastOne,
            None => copies,
        };
        self.kept_removals.read(batch);
        effect.events += batch.joined;
        for (at, event) in batch.events.iter().enumerate() {
            effect.events += 1;
            if matches!(event, Event::Cleared { .. }) {
                self.remove_kept(effect);
            }
            let impact = self.apply_event(at, event, copies, effect);
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

    fn apply_event(
        &mut self,
        at: usize,
        event: &Event,
        copies: CopyReport,
        effect: &mut BatchEffect,
    ) -> TreeImpact {
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
                    self.index_is_full = false;
                }
                let Some((_, tree)) = &mut self.tree else {
                    return TreeImpact::None;
                };
                let stored = blocks.len();
                // A repeated report looks like a new copy, but always begins at a prompt's first block.
                let copies = match after {
                    Parent::Block(_) if self.pages.is_none() => CopyReport::OneMore,
                    Parent::Root(_) | Parent::Block(_) => copies,
                };
                if tier != Tier::Gpu {
                    let unplaced = tree.store_lower(after, blocks, tier, copies);
                    effect.stored += (stored - unplaced) as u64;
                    if unplaced > 0 {
                        effect.ignored.push(IgnoredReason::UnknownCopy);
                    } else {
                        self.filter.on_placed(shape, tier, stored);
                    }
                    return TreeImpact::None;
                }
                if tree.store(after, blocks, tier, copies).is_err() {
                    // A first block has no parent that could be unknown, so the index refused it.
                    self.index_is_full |= matches!(after, Parent::Root(_));
                    let reason = match self.index_is_full {
                        true => IgnoredReason::IndexFull,
                        false => IgnoredReason::UnknownParent,
                    };
                    effect.ignored.push(reason);
                    return match event {
                        Event::Stored(stored) => impact_of_store(reason, stored),
                        Event::Removed(_) | Event::Cleared { .. } | Event::Unknown { .. } => {
                            TreeImpact::Incomplete
                        }
                    };
                }
                effect.stored += stored as u64;
                self.filter.on_placed(shape, tier, stored);
                TreeImpact::None
            }
            TreeChange::AddCopies { hashes, tier } => {
                let copies = match self.pages {
                    Some(_) => CopyReport::AtLeastOne,
                    None => CopyReport::OneMore,
                };
                let unknown = match &mut self.tree {
                    Some((_, tree)) => tree.add_copies(hashes, tier, copies),
                    None => hashes.len(),
                };
                effect.stored += (hashes.len() - unknown) as u64;
                if unknown > 0 {
                    effect.ignored.push(IgnoredReason::UnknownCopy);
                }
                TreeImpact::None
            }
            TreeChange::Remove { hashes, tier } => {
                effect.removed += hashes.len() as u64;
                effect.unknown_removals += match &mut self.tree {
                    None => hashes.len() as u64,
                    Some((_, tree)) if self.kept_removals.is_empty() => {
                        tree.remove(hashes, tier) as u64
                    }
                    Some((_, tree)) => {
                        remove_or_keep(tree, &mut self.kept_removals, at, hashes, tier)
                    }
                };
                TreeImpact::None
            }
            TreeChange::Forget { hashes, reason } => {
                effect.ignored.push(reason);
                let copies = self.tree.as_mut().map(|(_, tree)| forget(tree, hashes));
                match copies {
                    None | Some(0) => TreeImpact::None,
                    Some(_) => TreeImpact::Incomplete,
                }
            }
            TreeChange::Clear => {
                effect.cleared = true;
                effect.impact = TreeImpact::None;
                if let Some((_, tree)) = &mut self.tree {
                    tree.clear();
                    // What the index evicted was cleared too.
                    tree.take_evicted();
                }
                TreeImpact::None
            }
        }
    }

    /// Replaces the tree by an empty one for another replica's blocks, of a process about which these facts were
    /// learned.
    pub(super) fn begin_graft(&mut self, shape: BlockShape, learned: &LearnedFacts) {
        self.clear();
        self.filter.relearn(shape, learned);
        if self.tree.as_ref().is_some_and(|(of, _)| *of == shape) {
            return;
        }
        let index = self.indexes.index(&self.model, shape);
        let mut tree = index.add_tree(self.worker, self.rank);
        tree.set_visible(self.counts_in_routing);
        self.tree = Some((shape, tree));
    }

    pub(super) fn tree_mut(&mut self) -> Option<&mut Tree> {
        self.tree.as_mut().map(|(_, tree)| tree)
    }

    pub(super) fn learned(&self) -> LearnedFacts {
        self.filter.learned()
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

/// Removes one copy of each block now, except of those that the batch stores again after the event at `at`: they wait.
/// Returns how many blocks have no copy in that tier.
fn remove_or_keep(
    tree: &mut Tree,
    kept: &mut KeptRemovals,
    at: usize,
    hashes: &[EngineHash],
    tier: Tier,
) -> u64 {
    let mut missing = 0;
    let mut left = hashes;
    while !left.is_empty() {
        let run = left
            .iter()
            .take_while(|hash| !kept.is_stored_after(**hash, at));
        let (now, rest) = left.split_at(run.count());
        missing += tree.remove(now, tier) as u64;
        left = rest;
        if let [later, rest @ ..] = rest {
            match tree.count_copy_to_remove(*later, tier) {
                true => kept.keep(*later, tier),
                false => missing += 1,
            }
            left = rest;
        }
    }
    missing
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
