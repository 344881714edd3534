//! The KV memory of a modelled engine: blocks that running requests pin, what they have beside whole prompt blocks, and
//! computed blocks that no request needs, which stay cached until the room is needed. Pure.

use hashlink::LinkedHashMap;
use rustc_hash::{FxBuildHasher, FxHashMap};

use crate::ids::{Block, BlockHash};

#[derive(Debug)]
pub(super) struct Memory {
    capacity_tokens: u64,
    block_tokens: u64,
    pinned: FxHashMap<BlockHash, PinnedBlock>,
    /// Cached blocks that no request pins, the least recently used first. The end of a prompt is before its start, so a
    /// block is cached only while the blocks before it are.
    unused: LinkedHashMap<BlockHash, (), FxBuildHasher>,
    /// Tokens of running requests that are in no whole prompt block: the ends of prompts, and answers.
    private_tokens: u64,
    /// Evicted blocks that are not reported yet.
    evicted: Vec<BlockHash>,
}

#[derive(Debug, Default)]
struct PinnedBlock {
    requests: u32,
    is_computed: bool,
}

impl Memory {
    pub(super) fn new(capacity_blocks: usize, block_tokens: u32) -> Self {
        Self {
            capacity_tokens: capacity_blocks as u64 * u64::from(block_tokens),
            block_tokens: block_tokens.into(),
            pinned: FxHashMap::default(),
            unused: LinkedHashMap::default(),
            private_tokens: 0,
            evicted: Vec::new(),
        }
    }

    /// How many of a prompt's first blocks are cached.
    pub(super) fn cached_blocks(&self, prompt: &[Block]) -> usize {
        prompt.partition_point(|block| match self.pinned.get(&block.path) {
            Some(pinned) => pinned.is_computed,
            None => self.unused.contains_key(&block.path),
        })
    }

    /// Whether a request fits beside the running ones.
    pub(super) fn has_room(&self, prompt: &[Block], private_tokens: u64) -> bool {
        let is_new = |block: &&Block| !self.pinned.contains_key(&block.path);
        let new_blocks = prompt.iter().filter(is_new).count() as u64;
        // A block more, for the answer's first tokens.
        let tokens = (new_blocks + 1) * self.block_tokens + private_tokens;
        self.pinned_tokens() + tokens <= self.capacity_tokens
    }

    pub(super) fn pin(&mut self, prompt: &[Block], private_tokens: u64) {
        for block in prompt {
            let is_cached = self.unused.remove(&block.path).is_some();
            let pinned = self.pinned.entry(block.path).or_default();
            pinned.requests += 1;
            pinned.is_computed |= is_cached;
        }
        self.private_tokens += private_tokens;
    }

    pub(super) fn unpin(&mut self, prompt: &[Block], private_tokens: u64) {
        for block in prompt.iter().rev() {
            let Some(pinned) = self.pinned.get_mut(&block.path) else {
                continue;
            };
            pinned.requests -= 1;
            if pinned.requests == 0 {
                let is_computed = pinned.is_computed;
                self.pinned.remove(&block.path);
                if is_computed {
                    self.unused.insert(block.path, ());
                }
            }
        }
        self.private_tokens -= private_tokens;
    }

    /// The blocks of a pinned prompt are computed. Returns how many of them were before.
    pub(super) fn fill(&mut self, prompt: &[Block]) -> usize {
        let before = self.cached_blocks(prompt);
        for block in &prompt[before..] {
            if let Some(pinned) = self.pinned.get_mut(&block.path) {
                pinned.is_computed = true;
            }
        }
        before
    }

    pub(super) fn grow(&mut self, private_tokens: u64) {
        self.private_tokens += private_tokens;
    }

    /// Evicts what no request needs until the rest fits, or nothing is left to evict.
    pub(super) fn evict(&mut self) {
        let fitting = self.room_tokens() / self.block_tokens;
        while self.unused.len() as u64 > fitting {
            let oldest = self.unused.pop_front();
            self.evicted.extend(oldest.map(|(path, ())| path));
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.pinned_tokens() > self.capacity_tokens
    }

    /// Tokens that running requests can grow by.
    pub(super) fn room_tokens(&self) -> u64 {
        self.capacity_tokens.saturating_sub(self.pinned_tokens())
    }

    /// The part that running requests need; above 1 if one needs more than there is.
    pub(super) fn usage(&self) -> f64 {
        self.pinned_tokens() as f64 / self.capacity_tokens.max(1) as f64
    }

    /// The blocks that were evicted since the last call.
    pub(super) fn drain_evicted(&mut self) -> Vec<BlockHash> {
        std::mem::take(&mut self.evicted)
    }

    fn pinned_tokens(&self) -> u64 {
        self.pinned.len() as u64 * self.block_tokens + self.private_tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::text_block;

    fn prompt(names: &[u64]) -> Vec<Block> {
        let sized: Vec<_> = names.iter().map(|name| (*name, 10)).collect();
        text_block::chain(text_block::chain_root("m", None), sized.into_iter())
    }

    #[test]
    fn computed_blocks_stay_cached_until_running_requests_need_the_room() {
        let mut memory = Memory::new(4, 10);
        let (first, second) = (prompt(&[1, 2, 3]), prompt(&[1, 9, 9]));
        memory.pin(&first, 5);
        assert_eq!(memory.cached_blocks(&first), 0);
        assert_eq!(memory.fill(&first), 0);
        memory.unpin(&first, 5);
        assert_eq!(memory.cached_blocks(&first), 3);
        assert_eq!(memory.cached_blocks(&second), 1);
        memory.pin(&second, 0);
        memory.evict();
        assert_eq!(memory.drain_evicted(), [first[2].path]);
        assert_eq!(memory.cached_blocks(&first), 2);
    }

    #[test]
    fn a_preempted_request_leaves_nothing_that_was_not_computed() {
        let mut memory = Memory::new(4, 10);
        memory.pin(&prompt(&[1, 2]), 3);
        memory.unpin(&prompt(&[1, 2]), 3);
        assert_eq!(memory.cached_blocks(&prompt(&[1, 2])), 0);
        assert_eq!(memory.usage(), 0.0);
    }

    #[test]
    fn shared_blocks_take_room_once() {
        let mut memory = Memory::new(5, 10);
        memory.pin(&prompt(&[1, 2, 3]), 0);
        assert!(memory.has_room(&prompt(&[1, 2, 4]), 0));
        assert!(!memory.has_room(&prompt(&[4, 5]), 0));
        assert!(!memory.has_room(&prompt(&[1, 2, 4]), 1));
        memory.grow(21);
        assert!(memory.is_over());
    }
}
