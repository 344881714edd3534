//! Where one rank's tree stands: takes batches, plants the tree once the block size is known, and
//! counts what could not be placed. Does no I/O.

use std::num::NonZeroU32;
use std::sync::Arc;

use crate::ids::{Model, WorkerId};
use crate::kv::admit::{Admit, Change, Filtered, Harm, harm_of_store};
use crate::kv::event::{Batch, Event, Name, Tier};
use crate::kv::index::{CopyReport, Parent, Tree};
use crate::kv::indexes::PrefixIndexes;

/// What one batch did.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) events: u64,
    pub(super) stored: u64,
    pub(super) removed: u64,
    /// Removals of blocks that were not held.
    pub(super) unknown: u64,
    /// Whether the worker says that it holds nothing any more.
    pub(super) cleared: bool,
    pub(super) filtered: Vec<Filtered>,
    pub(super) harm: Harm,
}

pub(super) struct Ground {
    indexes: Arc<PrefixIndexes>,
    model: Model,
    worker: WorkerId,
    rank: u32,
    admit: Admit,
    tree: Option<(NonZeroU32, Tree)>,
    /// The index had no place for the tree, which takes nothing then.
    is_out: bool,
    is_scoring: bool,
}

impl Ground {
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
            admit: Admit::default(),
            tree: None,
            is_out: false,
            is_scoring: false,
        }
    }

    pub(super) fn tree(&self) -> Option<&(NonZeroU32, Tree)> {
        self.tree.as_ref()
    }

    /// Does what a batch says; `copies` is what it says of those of a chain's first blocks. Where it cannot be known what the batch removed, all is forgotten at that
    /// place, and the harm tells so.
    pub(super) fn apply(&mut self, batch: &Batch, copies: CopyReport, tally: &mut Tally) {
        for event in &batch.events {
            tally.events += 1;
            let harm = self.apply_event(event, copies, tally);
            if harm == Harm::Opaque {
                self.clear();
            }
            tally.harm = tally.harm.max(harm);
        }
        if self.was_cut() {
            tally.harm = tally.harm.max(Harm::Incomplete);
        }
    }

    fn apply_event(&mut self, event: &Event, copies: CopyReport, tally: &mut Tally) -> Harm {
        let change = match self.admit.admit(event) {
            Ok(change) => change,
            Err(left) => {
                tally.filtered.push(left.why);
                return left.harm;
            }
        };
        match change {
            Change::Store {
                after,
                blocks,
                tier,
                block_size,
            } => {
                if self
                    .tree
                    .as_ref()
                    .is_none_or(|(size, _)| *size != block_size)
                {
                    let index = self.indexes.index(&self.model, block_size);
                    let mut tree = index.add_tree(self.worker, self.rank);
                    tree.set_visible(self.is_scoring);
                    self.tree = Some((block_size, tree));
                    self.is_out = false;
                }
                let Some((_, tree)) = &mut self.tree else {
                    return Harm::None;
                };
                // Nothing on the wire tells a re-report from a new copy, but that it begins at the start.
                let copies = match after {
                    Parent::Root(_) => copies,
                    Parent::Block(_) => CopyReport::OneMore,
                };
                if tree.store(after, blocks, tier, copies).is_err() {
                    // What begins a chain needs no parent.
                    self.is_out |= matches!(after, Parent::Root(_));
                    let why = match self.is_out {
                        true => Filtered::IndexFull,
                        false => Filtered::UnknownParent,
                    };
                    tally.filtered.push(why);
                    return match event {
                        Event::Stored(stored) => harm_of_store(why, stored),
                        Event::Removed(_) | Event::Cleared { .. } | Event::Unknown { .. } => {
                            Harm::Incomplete
                        }
                    };
                }
                tally.stored += blocks.len() as u64;
                Harm::None
            }
            Change::Remove { names, tier } => {
                tally.removed += names.len() as u64;
                tally.unknown += match &mut self.tree {
                    Some((_, tree)) => tree.remove(names, tier) as u64,
                    None => names.len() as u64,
                };
                Harm::None
            }
            Change::Forget { names, why } => {
                tally.filtered.push(why);
                let held = self.tree.as_mut().map(|(_, tree)| forget(tree, names));
                match held {
                    None | Some(0) => Harm::None,
                    Some(_) => Harm::Incomplete,
                }
            }
            Change::Clear => {
                tally.cleared = true;
                if let Some((_, tree)) = &mut self.tree {
                    tree.clear();
                }
                Harm::None
            }
        }
    }

    /// Whether the memory bound took blocks since this was last asked: other trees' stores do that, too.
    pub(super) fn was_cut(&mut self) -> bool {
        self.tree
            .as_mut()
            .is_some_and(|(_, tree)| tree.take_evicted())
    }

    /// Forgets all, also what was learnt of the process.
    pub(super) fn clear(&mut self) {
        self.admit.forget();
        if std::mem::take(&mut self.is_out) {
            // There may be a place by now.
            self.tree = None;
        }
        if let Some((_, tree)) = &mut self.tree {
            tree.clear();
            // What was taken of the past is of no matter to what comes.
            tree.take_evicted();
        }
    }

    pub(super) fn set_scoring(&mut self, is_scoring: bool) {
        if self.is_scoring != is_scoring {
            self.is_scoring = is_scoring;
            if let Some((_, tree)) = &mut self.tree {
                tree.set_visible(is_scoring);
            }
        }
    }
}

/// Removes every copy in every tier; gives how many there were.
fn forget(tree: &mut Tree, names: &[Name]) -> usize {
    let mut held = 0;
    for name in names {
        for tier in Tier::ALL {
            while tree.remove(&[*name], tier) == 0 {
                held += 1;
            }
        }
    }
    held
}
