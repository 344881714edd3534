//! The router's exact index, fed with the KV events of the modelled engines. All replicas get all events at the same
//! time, so they share one index.

use std::num::NonZeroU32;
use std::sync::Arc;

use super::engine::StoredBlocks;
use super::workload::{Job, tokens_of};
use crate::ids::{BlockHash, Model, WorkerId};
use crate::kv::block::ChainRoot;
use crate::kv::event::{EngineHash, Tier};
use crate::kv::index::{CopyReport, NewBlock, Parent, PrefixIndex, Tree};
use crate::kv::indexes::{PrefixIndexes, Settings};
use crate::observe::metrics::Registry;

#[derive(Debug)]
pub(super) struct ReportedIndex {
    /// Enforces the memory limit of the index.
    _indexes: Arc<PrefixIndexes>,
    index: Arc<PrefixIndex>,
    root: ChainRoot,
    trees: Vec<Tree>,
}

impl ReportedIndex {
    pub(super) fn new(workers: usize, block_tokens: NonZeroU32, root: ChainRoot) -> Self {
        let indexes = PrefixIndexes::new(Settings::default(), &Registry::default());
        let index = indexes.index(&Model::from("replay"), block_tokens);
        let add_tree = |worker| {
            let mut tree = index.add_tree(WorkerId(worker as u32), 0);
            // There is no connection to lose, so the tree is usable from the first block on.
            tree.set_visible(true);
            tree
        };
        Self {
            trees: (0..workers).map(add_tree).collect(),
            index,
            root,
            _indexes: indexes,
        }
    }

    /// Applies the KV events of a computed prompt.
    pub(super) fn store(&mut self, worker: usize, job: &Job, stored: &StoredBlocks) {
        let parent = match stored.cached.checked_sub(1) {
            Some(last) => Parent::Block(name(job.blocks[last].path)),
            None => Parent::Root(self.root),
        };
        let new: Vec<NewBlock> = (stored.cached..stored.end)
            .map(|index| NewBlock {
                name: name(job.blocks[index].path),
                local: job.locals[index],
            })
            .collect();
        // Fails only if the memory limit has evicted the parent; then the index does not know these blocks.
        let _ = self.trees[worker].store(parent, &new, Tier::Gpu, CopyReport::OneMore);
    }

    /// Applies the KV events of evicted blocks.
    pub(super) fn remove(&mut self, worker: usize, evicted: &[BlockHash]) {
        let evicted: Vec<EngineHash> = evicted.iter().map(|path| name(*path)).collect();
        self.trees[worker].remove(&evicted, Tier::Gpu);
    }

    /// Cached tokens of a prompt, by worker index.
    pub(super) fn cached_tokens(&self, job: &Job) -> Vec<u32> {
        let mut tokens = vec![0; self.trees.len()];
        let mut found = Vec::with_capacity(self.trees.len());
        self.index.overlap(self.root, &job.locals, &mut found);
        for depth in found {
            tokens[depth.worker.0 as usize] = tokens_of(&job.blocks, depth.blocks as usize);
        }
        tokens
    }
}

/// The engine's hash of a block; any unique number will do.
fn name(path: BlockHash) -> EngineHash {
    EngineHash(path.0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::sim::replay::lru::Lru;
    use crate::sim::replay::workload;
    use crate::sim::replay::workload::tests::{entry, settings};

    proptest! {
        /// Through stores and removals, the index agrees with the caches.
        #[test]
        fn the_index_agrees_with_the_caches(
            requests in proptest::collection::vec((0usize..3, proptest::collection::vec(0u64..3, 0..6)), 1..40),
        ) {
            let prompt = |letters: &[u64]| {
                // As in a trace, an id stands for a block and all blocks before it.
                let names = (1..=letters.len()).map(|end| letters[..end].iter().fold(1, |name, letter| name * 4 + letter));
                entry(0, letters.len() as u32 * 10, &names.collect::<Vec<_>>())
            };
            let entries: Vec<_> = requests.iter().map(|(_, letters)| prompt(letters)).collect();
            let jobs = workload::jobs(&entries, &settings());
            let mut index = ReportedIndex::new(3, settings().block_tokens, workload::root());
            let mut caches = [8, 8, 8].map(Lru::new);
            for ((worker, _), job) in requests.iter().zip(&jobs) {
                let mut evicted = Vec::new();
                let (cached, end) = caches[*worker].insert(&job.blocks, &mut evicted);
                index.store(*worker, job, &StoredBlocks { request: 0, cached, end });
                index.remove(*worker, &evicted);
                for asked in &jobs {
                    let cached = caches.each_ref().map(|cache| tokens_of(&asked.blocks, cache.cached_blocks(&asked.blocks)));
                    prop_assert_eq!(index.cached_tokens(asked), cached);
                }
            }
        }
    }
}
