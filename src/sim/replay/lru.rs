//! A prefix cache of whole blocks that keeps what was used last. No time, no requests.

use hashlink::LinkedHashMap;
use rustc_hash::FxBuildHasher;

use crate::ids::{Block, BlockHash};

/// Who holds a block holds all before it, since a prompt's end grows old before its start.
#[derive(Debug)]
pub(super) struct Lru {
    held: LinkedHashMap<BlockHash, (), FxBuildHasher>,
    blocks_max: usize,
}

impl Lru {
    pub(super) fn new(blocks_max: usize) -> Self {
        Self {
            held: LinkedHashMap::default(),
            blocks_max,
        }
    }

    /// How many of a prompt's first blocks are held.
    pub(super) fn depth(&self, prompt: &[Block]) -> usize {
        prompt.partition_point(|block| self.held.contains_key(&block.path))
    }

    /// Holds a prompt, or as much of it as there is room for at all. What had to go for it is appended
    /// to `evicted`. Returns how many blocks were held before, and how many are now.
    pub(super) fn put(&mut self, prompt: &[Block], evicted: &mut Vec<BlockHash>) -> (usize, usize) {
        let prompt = &prompt[..prompt.len().min(self.blocks_max)];
        let before = self.depth(prompt);
        for block in prompt.iter().rev() {
            if self.held.to_back(&block.path).is_none() {
                self.held.insert(block.path, ());
            }
        }
        while self.held.len() > self.blocks_max {
            evicted.extend(self.held.pop_front().map(|(path, ())| path));
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
    fn the_end_of_the_prompt_used_longest_ago_goes_first() {
        let mut cache = Lru::new(4);
        let mut evicted = Vec::new();
        assert_eq!(cache.put(&prompt(&[1, 2]), &mut evicted), (0, 2));
        assert_eq!(cache.put(&prompt(&[1, 3, 4]), &mut evicted), (1, 3));
        assert_eq!(cache.put(&prompt(&[1, 3, 5]), &mut evicted), (2, 3));
        assert_eq!(evicted, [prompt(&[1, 2])[1].path]);
    }

    #[test]
    fn what_is_longer_than_the_cache_is_held_as_far_as_it_fits() {
        let mut cache = Lru::new(2);
        assert_eq!(cache.put(&prompt(&[1, 2, 3]), &mut Vec::new()), (0, 2));
        assert_eq!(cache.depth(&prompt(&[1, 2, 3])), 2);
    }

    proptest! {
        /// A list of blocks, the last used at its end.
        #[test]
        fn it_is_what_a_list_says(prompts in proptest::collection::vec(proptest::collection::vec(0u64..3, 0..6), 0..40), blocks_max in 1usize..12) {
            let mut cache = Lru::new(blocks_max);
            let mut list: Vec<BlockHash> = Vec::new();
            for letters in prompts {
                let prompt = prompt(&letters);
                let held = prompt.iter().take_while(|block| list.contains(&block.path)).count();
                prop_assert_eq!(cache.depth(&prompt), held);
                let mut evicted = Vec::new();
                cache.put(&prompt, &mut evicted);
                for block in prompt.iter().take(blocks_max).rev() {
                    list.retain(|path| *path != block.path);
                    list.push(block.path);
                }
                let gone = list.len().saturating_sub(blocks_max);
                prop_assert_eq!(list.drain(..gone).collect::<Vec<_>>(), evicted);
                prop_assert_eq!(list.len(), cache.held.len());
            }
        }
    }
}
