//! The paged prefix cache of the simulated engine: a fixed number of blocks, identified by a hash of their content and
//! of all blocks before. Pure.
//!
//! It follows vLLM's block pool. A block is pinned by the requests that use it. An unused block keeps its content until
//! it is evicted, least recently used first. Two requests that compute the same content at the same time fill two
//! blocks with the same hash, so a hash can be stored several times and is removed once for each copy.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU32;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The hash of a full block: over its own tokens and all tokens before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BlockHash(pub u64);

/// A change of the cache, for the KV events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Consecutive blocks were filled with `token_ids`; `parent` is the block before the first of them.
    Stored {
        parent: Option<BlockHash>,
        hashes: Vec<BlockHash>,
        token_ids: Vec<u32>,
        label: Option<Arc<Label>>,
    },
    /// One copy of each of these blocks was evicted.
    Removed { hashes: Vec<BlockHash> },
    /// The cache was cleared.
    Cleared,
}

/// What KV events report about a request's blocks beside their tokens. The cache only stores it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Label {
    /// The LoRA adapter: its number and its name.
    pub lora: Option<(i64, Box<str>)>,
    pub cache_salt: Option<Box<str>>,
    pub session_id: Option<Box<str>>,
}

/// The content of one or more cached blocks with the same hash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CachedBlock {
    pub hash: BlockHash,
    /// The block before it; `None` for the first block of a prompt.
    pub parent: Option<BlockHash>,
    /// The block's own tokens.
    pub token_ids: Vec<u32>,
    /// The label of the copy that was stored first.
    #[serde(skip)]
    pub label: Option<Arc<Label>>,
    /// The number of blocks with this content; at least one.
    pub copies: usize,
}

/// The blocks of one request, in the order of its tokens. They stay pinned until they are passed to
/// [`Cache::release`].
#[derive(Debug)]
#[must_use = "a path that is not released pins its blocks forever"]
pub struct Path {
    slots: Vec<SlotNumber>,
    /// How many of the first slots are full and have a hash.
    named: usize,
    /// The hash of the last full slot, or the root.
    tip: u64,
    label: Option<Arc<Label>>,
}

#[derive(Debug)]
pub struct Cache {
    block_tokens: usize,
    slots: Vec<Slot>,
    /// Free slots without content, which are used first.
    empty: Vec<SlotNumber>,
    /// Free slots with content, least recently used first.
    idle: BTreeMap<u64, SlotNumber>,
    contents: HashMap<BlockHash, Content>,
    /// The number of releases; orders `idle`.
    clock: u64,
    changes: Vec<Change>,
}

type SlotNumber = u32;

#[derive(Clone, Debug, Default)]
struct Slot {
    name: Option<BlockHash>,
    users: u32,
    idle_since: u64,
}

/// The content of a hash.
#[derive(Debug)]
struct Content {
    parent: Option<BlockHash>,
    token_ids: Box<[u32]>,
    label: Option<Arc<Label>>,
    /// Oldest first; never empty.
    copies: Vec<SlotNumber>,
}

impl Path {
    /// Sets the label of blocks that are filled from now on.
    pub fn labelled(self, label: Option<Arc<Label>>) -> Self {
        Self { label, ..self }
    }

    /// The number of blocks.
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// vLLM's block ids, which start at 1 because vLLM does not use block 0.
    pub(super) fn numbers(&self) -> Vec<u32> {
        self.slots.iter().map(|number| number + 1).collect()
    }
}

impl Cache {
    pub fn new(block_tokens: NonZeroU32, capacity_blocks: NonZeroU32) -> Self {
        let capacity = capacity_blocks.get();
        Self {
            block_tokens: block_tokens.get() as usize,
            slots: vec![Slot::default(); capacity as usize],
            empty: (0..capacity).rev().collect(),
            idle: BTreeMap::new(),
            contents: HashMap::new(),
            clock: 0,
            changes: Vec::new(),
        }
    }

    /// Takes the blocks for a prompt: the cached prefix, and free blocks for the rest. Also returns the number of cached
    /// tokens. `None` if there is no room now.
    ///
    /// At least one token is left to compute, because it gives the first token of the answer: a prompt that fills its
    /// blocks exactly computes its last block again.
    pub fn open(&mut self, root: u64, tokens: &[u32]) -> Option<(Path, usize)> {
        let hits = self.cached_prefix(root, tokens);
        let idle_hits = hits.iter().filter(|hit| self.slot(hit.1).users == 0);
        let free_after_hits = self.free_blocks() - idle_hits.count();
        if self.blocks_for(tokens.len()) - hits.len() > free_after_hits {
            return None;
        }
        let mut path = Path {
            slots: Vec::with_capacity(self.blocks_for(tokens.len())),
            named: hits.len(),
            tip: hits.last().map_or(root, |(name, _)| name.0),
            label: None,
        };
        for (_, number) in &hits {
            self.pin(*number);
            path.slots.push(*number);
        }
        let grown = self.grow(&mut path, tokens.len());
        debug_assert!(grown, "the room was counted above");
        Some((path, hits.len() * self.block_tokens))
    }

    /// Adds free blocks until the path has room for `tokens`. False, and nothing is changed, if there are too few.
    #[must_use = "without the room the tokens cannot be computed"]
    pub fn grow(&mut self, path: &mut Path, tokens: usize) -> bool {
        let missing = self.blocks_for(tokens).saturating_sub(path.slots.len());
        if missing > self.free_blocks() {
            return false;
        }
        let mut evicted = Vec::new();
        for _ in 0..missing {
            let number = match self.empty.pop() {
                Some(number) => number,
                None => self.evict(&mut evicted),
            };
            self.slot_mut(number).users = 1;
            path.slots.push(number);
        }
        if !evicted.is_empty() {
            self.changes.push(Change::Removed { hashes: evicted });
        }
        true
    }

    /// Hashes the blocks that the first `computed` of `tokens` have filled. From now on they are cache hits.
    pub fn fill(&mut self, path: &mut Path, tokens: &[u32], computed: usize) {
        let full = computed / self.block_tokens;
        if full <= path.named {
            return;
        }
        let first_parent = (path.named > 0).then_some(BlockHash(path.tip));
        let mut parent = first_parent;
        let token_ids = &tokens[path.named * self.block_tokens..full * self.block_tokens];
        let mut hashes = Vec::with_capacity(full - path.named);
        for block in token_ids.chunks_exact(self.block_tokens) {
            let name = chain(path.tip, block);
            let number = path.slots[path.named];
            self.slot_mut(number).name = Some(name);
            let content = self.contents.entry(name).or_insert_with(|| Content {
                parent,
                token_ids: block.into(),
                label: path.label.clone(),
                copies: Vec::with_capacity(1),
            });
            content.copies.push(number);
            hashes.push(name);
            parent = Some(name);
            path.tip = name.0;
            path.named += 1;
        }
        self.changes.push(Change::Stored {
            parent: first_parent,
            hashes,
            token_ids: token_ids.to_vec(),
            label: path.label.clone(),
        });
    }

    /// Unpins the blocks. The last ones count as older, so that a path is evicted from its end and a prefix remains.
    pub fn release(&mut self, path: Path) {
        for number in path.slots.into_iter().rev() {
            self.clock += 1;
            let clock = self.clock;
            let slot = self.slot_mut(number);
            slot.users -= 1;
            if slot.users > 0 {
                continue;
            }
            slot.idle_since = clock;
            if slot.name.is_some() {
                self.idle.insert(clock, number);
            } else {
                self.empty.push(number);
            }
        }
    }

    /// Clears the cache. False, and nothing is changed, while any block is in use.
    pub fn reset(&mut self) -> bool {
        if self.used_blocks() > 0 {
            return false;
        }
        for (_, number) in std::mem::take(&mut self.idle) {
            self.slot_mut(number).name = None;
            self.empty.push(number);
        }
        self.contents.clear();
        self.changes.push(Change::Cleared);
        true
    }

    /// The number of cached tokens of a prompt.
    pub fn hit_tokens(&self, root: u64, tokens: &[u32]) -> usize {
        self.cached_prefix(root, tokens).len() * self.block_tokens
    }

    /// All cached blocks, sorted by hash.
    pub fn list(&self) -> Vec<CachedBlock> {
        let cached_block = |(hash, content): (&BlockHash, &Content)| CachedBlock {
            hash: *hash,
            parent: content.parent,
            token_ids: content.token_ids.to_vec(),
            label: content.label.clone(),
            copies: content.copies.len(),
        };
        let mut list: Vec<CachedBlock> = self.contents.iter().map(cached_block).collect();
        list.sort_unstable_by_key(|block| block.hash);
        list
    }

    pub fn capacity_blocks(&self) -> usize {
        self.slots.len()
    }

    /// Blocks in use by requests. A cached block that no request uses counts as free.
    pub fn used_blocks(&self) -> usize {
        self.capacity_blocks() - self.free_blocks()
    }

    /// Takes the changes since the last call.
    pub fn drain_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    fn free_blocks(&self) -> usize {
        self.empty.len() + self.idle.len()
    }

    fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_tokens)
    }

    fn cached_prefix(&self, root: u64, tokens: &[u32]) -> Vec<(BlockHash, SlotNumber)> {
        let hittable = tokens.len().saturating_sub(1);
        let mut tip = root;
        tokens[..hittable]
            .chunks_exact(self.block_tokens)
            .map_while(|block| {
                let name = chain(tip, block);
                tip = name.0;
                let oldest = *self.contents.get(&name)?.copies.first()?;
                Some((name, oldest))
            })
            .collect()
    }

    fn pin(&mut self, number: SlotNumber) {
        let slot = self.slot_mut(number);
        slot.users += 1;
        if slot.users == 1 {
            let idle_since = slot.idle_since;
            self.idle.remove(&idle_since);
        }
    }

    fn evict(&mut self, evicted: &mut Vec<BlockHash>) -> SlotNumber {
        let (_, number) = self
            .idle
            .pop_first()
            .expect("the caller counted the free blocks");
        let name = self
            .slot_mut(number)
            .name
            .take()
            .expect("only blocks with a hash are idle");
        let content = self
            .contents
            .get_mut(&name)
            .expect("every hash of a block has its content");
        content.copies.retain(|copy| *copy != number);
        if content.copies.is_empty() {
            self.contents.remove(&name);
        }
        evicted.push(name);
        number
    }

    fn slot(&self, number: SlotNumber) -> &Slot {
        &self.slots[number as usize]
    }

    fn slot_mut(&mut self, number: SlotNumber) -> &mut Slot {
        &mut self.slots[number as usize]
    }
}

/// The hash of a block after the block with the hash `parent`.
fn chain(parent: u64, block: &[u32]) -> BlockHash {
    let mut bytes = Vec::with_capacity(block.len() * 4);
    for token in block {
        bytes.extend_from_slice(&token.to_le_bytes());
    }
    BlockHash(xxh3_64_with_seed(&bytes, parent))
}

#[cfg(test)]
mod tests;
