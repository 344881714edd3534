//! An LRU prefix cache of whole blocks. Pure.

use hashlink::LinkedHashMap;
use rustc_hash::FxBuildHasher;

use crate::ids::{Block, BlockHash};

/// If a block is cached, so are all blocks before it in the prompt: the end of a prompt is evicted before its start.
#[derive(Debug)]
pub(super) struct Lru {
    blocks: LinkedHashMap<BlockHash, (), FxBuildHasher>,
    max_blocks: usize,
}

impl Lru {
    pub(super) fn new(max_blocks: usize) -> Self {
        Self {
            blocks: LinkedHashMap::default(),
            max_blocks,
        }
    }

    /// How many of a prompt's first blocks are cached.
    pub(super) fn cached_blocks(&self, prompt: &[Block]) -> usize {
        prompt.partition_point(|block| self.blocks.contains_key(&block.path))
    }

    /// Caches a prompt, or as much of it as fits at all, and appends the evicted blocks to `evicted`. Returns how many
    /// of the prompt's blocks were cached before and how many are now.
    pub(super) fn insert(
        &mut self,
        prompt: &[Block],
        evicted: &mut Vec<BlockHash>,
    ) -> (usize, usize) {
        let prompt = &prompt[..prompt.len().min(self.max_blocks)];
        let before = self.cached_blocks(prompt);
        for block in prompt.iter().rev() {
            if self.blocks.to_back(&block.path).is_none() {
                self.blocks.insert(block.path, ());
            }
        }
        while self.blocks.len() > self.max_blocks {
            evicted.extend(self.blocks.pop_front().map(|(path, ())| path));
        }
        (before, prompt.len())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::kv::text_block;

    fn prompt(letters: &[u64]) -> Vec<Block> {
        let locals = letters.iter().map(|letter| (*letter, 16));
        text_block::chain(
            text_block::chain_root("m", None),
            locals.collect::<Vec<_>>().into_iter(),
        )
    }

    #[test]
    fn the_end_of_the_least_recently_used_prompt_is_evicted_first() {
        let mut cache = Lru::new(4);
        let mut evicted = Vec::new();
        assert_eq!(cache.insert(&prompt(&[1, 2]), &mut evicted), (0, 2));
        assert_eq!(cache.insert(&prompt(&[1, 3, 4]), &mut evicted), (1, 3));
        assert_eq!(cache.insert(&prompt(&[1, 3, 5]), &mut evicted), (2, 3));
        assert_eq!(evicted, [prompt(&[1, 2])[1].path]);
    }

    #[test]
    fn a_prompt_longer_than_the_cache_is_cached_as_far_as_it_fits() {
        let mut cache = Lru::new(2);
        assert_eq!(cache.insert(&prompt(&[1, 2, 3]), &mut Vec::new()), (0, 2));
        assert_eq!(cache.cached_blocks(&prompt(&[1, 2, 3])), 2);
    }

    proptest! {
        /// The model is a list of blocks in the order of their last use.
        #[test]
        fn it_agrees_with_a_list(prompts in proptest::collection::vec(proptest::collection::vec(0u64..3, 0..6), 0..40), max_blocks in 1usize..12) {
            let mut cache = Lru::new(max_blocks);
            let mut list: Vec<BlockHash> = Vec::new();
            for letters in prompts {
                let prompt = prompt(&letters);
                let cached = prompt.iter().take_while(|block| list.contains(&block.path)).count();
                prop_assert_eq!(cache.cached_blocks(&prompt), cached);
                let mut evicted = Vec::new();
                cache.insert(&prompt, &mut evicted);
                for block in prompt.iter().take(max_blocks).rev() {
                    list.retain(|path| *path != block.path);
                    list.push(block.path);
                }
                let excess = list.len().saturating_sub(max_blocks);
                prop_assert_eq!(list.drain(..excess).collect::<Vec<_>>(), evicted);
                prop_assert_eq!(list.len(), cache.blocks.len());
            }
        }
    }
}
