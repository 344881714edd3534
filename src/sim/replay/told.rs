//! What the engines' cache events have told so far, in the real index. Every router hears all of them
//! at the same time, so one index serves them all.

use std::num::NonZeroU32;
use std::sync::Arc;

use super::engine::Change;
use super::workload::{Job, tokens_of};
use crate::ids::{BlockHash, Model, WorkerId};
use crate::kv::block::ChainRoot;
use crate::kv::event::{Name, Tier};
use crate::kv::index::{CopyReport, NewBlock, Parent, PrefixIndex, Tree};
use crate::kv::indexes::{PrefixIndexes, Settings};
use crate::observe::metrics::Registry;

#[derive(Debug)]
pub(super) struct Told {
    /// Keeps the index's memory bound.
    _indexes: Arc<PrefixIndexes>,
    index: Arc<PrefixIndex>,
    root: ChainRoot,
    trees: Vec<Tree>,
}

impl Told {
    pub(super) fn new(workers: usize, block_tokens: NonZeroU32, root: ChainRoot) -> Self {
        let indexes = PrefixIndexes::new(Settings::default(), &Registry::default());
        let index = indexes.index(&Model::from("replay"), block_tokens);
        let plant = |worker| {
            let mut tree = index.add_tree(WorkerId(worker as u32), 0);
            // There is no connection to lose: each is known from its first block on.
            tree.set_visible(true);
            tree
        };
        Self {
            trees: (0..workers).map(plant).collect(),
            index,
            root,
            _indexes: indexes,
        }
    }

    /// An engine has computed a prompt.
    pub(super) fn apply(&mut self, worker: usize, job: &Job, change: &Change) {
        let tree = &mut self.trees[worker];
        let after = match change.held.checked_sub(1) {
            Some(last) => Parent::Block(name(job.blocks[last].path)),
            None => Parent::Root(self.root),
        };
        let new: Vec<NewBlock> = (change.held..change.end)
            .map(|place| NewBlock {
                name: name(job.blocks[place].path),
                local: job.locals[place],
            })
            .collect();
        // Fails only where the index's memory bound has taken the parent: then these are not known.
        let _ = tree.store(after, &new, Tier::Gpu, CopyReport::OneMore);
        let evicted: Vec<Name> = change.evicted.iter().map(|path| name(*path)).collect();
        tree.remove(&evicted, Tier::Gpu);
    }

    /// Tokens of a prompt's start that each worker holds.
    pub(super) fn tokens(&self, job: &Job) -> Vec<u32> {
        let mut tokens = vec![0; self.trees.len()];
        let mut found = Vec::with_capacity(self.trees.len());
        self.index.overlap(self.root, &job.locals, &mut found);
        for depth in found {
            tokens[depth.worker.0 as usize] = tokens_of(&job.blocks, depth.blocks as usize);
        }
        tokens
    }
}

/// An engine may name its blocks as it likes.
fn name(path: BlockHash) -> Name {
    Name(path.0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::sim::replay::lru::Lru;
    use crate::sim::replay::workload;
    use crate::sim::replay::workload::tests::{entry, shape};

    proptest! {
        /// Through stores and removals, what is known is what the caches hold.
        #[test]
        fn it_knows_what_the_caches_hold(
            requests in proptest::collection::vec((0usize..3, proptest::collection::vec(0u64..3, 0..6)), 1..40),
        ) {
            let prompt = |letters: &[u64]| {
                // As in a trace, a name stands for a block and all before it.
                let names = (1..=letters.len()).map(|end| letters[..end].iter().fold(1, |name, it| name * 4 + it));
                entry(0, letters.len() as u32 * 10, &names.collect::<Vec<_>>())
            };
            let entries: Vec<_> = requests.iter().map(|(_, letters)| prompt(letters)).collect();
            let jobs = workload::jobs(&entries, &shape());
            let mut told = Told::new(3, shape().block_tokens, workload::root());
            let mut caches = [8, 8, 8].map(Lru::new);
            for ((worker, _), job) in requests.iter().zip(&jobs) {
                let mut change = Change::default();
                (change.held, change.end) = caches[*worker].put(&job.blocks, &mut change.evicted);
                told.apply(*worker, job, &change);
                for asked in &jobs {
                    let held = caches.each_ref().map(|cache| tokens_of(&asked.blocks, cache.depth(&asked.blocks)));
                    prop_assert_eq!(told.tokens(asked), held);
                }
            }
        }
    }
}
