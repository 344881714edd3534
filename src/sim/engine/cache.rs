//! The paged prefix cache of the pretend engine: a fixed number of blocks, named by what they hold.
//!
//! It follows vLLM's block pool. A block belongs to the requests that use it, and when none does it
//! waits in the order of its last use, still holding its content, until somebody needs the room. Two
//! requests that compute the same content fill two blocks under one name, so a name can be stored
//! several times and is removed once for each copy. The cache knows nothing of time or requests.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU32;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The name of a full block: a chain over its own tokens and all tokens before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BlockHash(pub u64);

/// What happened to the blocks, in order. The engine's cache events are made from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Consecutive blocks now hold `token_ids`; `parent` comes before the first of them.
    Stored {
        parent: Option<BlockHash>,
        hashes: Vec<BlockHash>,
        token_ids: Vec<u32>,
        label: Option<Arc<Label>>,
    },
    /// One copy of each of these is gone.
    Removed { hashes: Vec<BlockHash> },
    /// Nothing is held any more.
    Cleared,
}

/// What a request's blocks are told with, beside their tokens. It is carried along and not looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Label {
    /// The adapter that computed them: its number and its name.
    pub lora: Option<(i64, Box<str>)>,
    pub cache_salt: Option<Box<str>>,
    pub session_id: Option<Box<str>>,
}

/// A name and what is held under it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    pub hash: BlockHash,
    /// The block before it; none for a prompt's first.
    pub parent: Option<BlockHash>,
    /// The block's own tokens.
    pub token_ids: Vec<u32>,
    /// As its first copy was stored.
    #[serde(skip)]
    pub label: Option<Arc<Label>>,
    /// Blocks that hold this; at least one.
    pub copies: usize,
}

/// The blocks of one request, in the order of its tokens. They stay pinned until they are given
/// back to [`Cache::release`]; the path itself cannot do that, as it does not own the cache.
#[derive(Debug)]
#[must_use = "a path that is not released pins its blocks for ever"]
pub struct Path {
    slots: Vec<SlotNumber>,
    /// How many of the first slots are full and named.
    named: usize,
    /// The name of the last named slot, or the root's if none is.
    tip: u64,
    label: Option<Arc<Label>>,
}

#[derive(Debug)]
pub struct Cache {
    block_tokens: usize,
    slots: Vec<Slot>,
    /// Free and without content: used first, as nothing is lost by it.
    empty: Vec<SlotNumber>,
    /// Free with content, the least recently used first.
    idle: BTreeMap<u64, SlotNumber>,
    contents: HashMap<BlockHash, Content>,
    /// Counts releases; the order of `idle`.
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

/// What is held under a name.
#[derive(Debug)]
struct Content {
    parent: Option<BlockHash>,
    token_ids: Box<[u32]>,
    label: Option<Arc<Label>>,
    /// The oldest first; never empty.
    copies: Vec<SlotNumber>,
}

impl Path {
    /// From now on the path's blocks are told with `label`.
    pub fn labelled(self, label: Option<Arc<Label>>) -> Self {
        Self { label, ..self }
    }

    /// How many blocks it has.
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Its blocks as an engine numbers them: from 1 on, for vLLM gives block 0 to nobody.
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

    /// Takes the blocks for a prompt: those that already hold its beginning, and free ones for the
    /// rest. Also says how many tokens need not be computed. `None` if there is no room now.
    ///
    /// At least one token is left to compute, because the first token of the answer comes from it:
    /// a prompt that fills its blocks exactly computes its last block again.
    pub fn open(&mut self, root: u64, tokens: &[u32]) -> Option<(Path, usize)> {
        let hits = self.held(root, tokens);
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

    /// Adds free blocks until the path has room for `tokens`; false, and unchanged, if there are too
    /// few.
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

    /// Names the blocks that the first `computed` of `tokens` have filled; from now on they are hits.
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

    /// Tells again what the path's named blocks hold, as if they were stored now.
    pub fn report(&mut self, path: &Path, tokens: &[u32]) {
        if path.named == 0 {
            return;
        }
        let name = |number: &SlotNumber| self.slot(*number).name;
        let hashes = path.slots[..path.named].iter().filter_map(name).collect();
        self.changes.push(Change::Stored {
            parent: None,
            hashes,
            token_ids: tokens[..path.named * self.block_tokens].to_vec(),
            label: path.label.clone(),
        });
    }

    /// Gives the blocks back. The last ones count as older, so that a path is evicted from its end
    /// and what stays is always a beginning.
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

    /// Forgets everything; false, and unchanged, while any block is in use.
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

    /// How many of the first tokens a prompt would not have to compute now.
    pub fn hit_tokens(&self, root: u64, tokens: &[u32]) -> usize {
        self.held(root, tokens).len() * self.block_tokens
    }

    /// All that is held, in the order of names.
    pub fn list(&self) -> Vec<Held> {
        let held = |(hash, content): (&BlockHash, &Content)| Held {
            hash: *hash,
            parent: content.parent,
            token_ids: content.token_ids.to_vec(),
            label: content.label.clone(),
            copies: content.copies.len(),
        };
        let mut list: Vec<Held> = self.contents.iter().map(held).collect();
        list.sort_unstable_by_key(|held| held.hash);
        list
    }

    pub fn capacity_blocks(&self) -> usize {
        self.slots.len()
    }

    /// Blocks that a request is using. A block that only holds content counts as free.
    pub fn used_blocks(&self) -> usize {
        self.capacity_blocks() - self.free_blocks()
    }

    /// Takes what has happened since the last call.
    pub fn drain_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    fn free_blocks(&self) -> usize {
        self.empty.len() + self.idle.len()
    }

    fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_tokens)
    }

    fn held(&self, root: u64, tokens: &[u32]) -> Vec<(BlockHash, SlotNumber)> {
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
            .expect("only named blocks are kept idle");
        let content = self
            .contents
            .get_mut(&name)
            .expect("every named block is listed under its name");
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

/// The name of a block that follows the one named `parent`.
fn chain(parent: u64, block: &[u32]) -> BlockHash {
    let mut bytes = Vec::with_capacity(block.len() * 4);
    for token in block {
        bytes.extend_from_slice(&token.to_le_bytes());
    }
    BlockHash(xxh3_64_with_seed(&bytes, parent))
}

#[cfg(test)]
mod tests;
