//! What the writer knows of one tree besides its bits in the pages, and how many copies of a block it has in each tier.

use std::hash::Hash;

use hashbrown::{HashMap, HashSet};
use rustc_hash::FxBuildHasher;

use crate::kv::event::{EngineHash, Tier};
use crate::kv::index::pages::{BlockId, LARGE_TABLE, PageId, Slot};
use crate::kv::index::types::TreeBlock;

pub(super) type Copies = [u16; Tier::COUNT];

/// An unknown number of copies, at least one: too many to count, or the block may have been reported before.
/// Counts as gone when one is removed.
pub(super) const UNKNOWN: u16 = u16::MAX;

/// The copies that a residency (the fastest tier with a copy) alone stands for; other numbers are noted for the tree.
fn default_copies(residency: Option<Tier>) -> Copies {
    let mut copies = [0; Tier::COUNT];
    if let Some(tier) = residency {
        copies[tier as usize] = 1;
    }
    copies
}

pub(super) fn residency_of(copies: Copies) -> Option<Tier> {
    let has_copy = |tier: &Tier| copies[*tier as usize] > 0;
    Tier::ALL.into_iter().find(has_copy)
}

/// The copies as a listing has them.
pub(super) fn listed(copies: Copies) -> [u32; Tier::COUNT] {
    copies.map(|copies| match copies {
        UNKNOWN => TreeBlock::UNKNOWN_COPIES,
        count => count.into(),
    })
}

#[derive(Debug)]
pub(in crate::kv::index) struct TreeState {
    pub(super) slot: Slot,
    /// The pages of which the tree owns any block.
    pub(super) pages: HashSet<PageId, FxBuildHasher>,
    /// Blocks that the tree knows by another name than the name table has, both ways.
    aliases: HashMap<EngineHash, BlockId, FxBuildHasher>,
    names: HashMap<BlockId, EngineHash, FxBuildHasher>,
    /// Copies of blocks that have other than the [`default_copies`] of their residency.
    copies: HashMap<BlockId, Copies, FxBuildHasher>,
    /// Blocks in each tier, and in any.
    pub(in crate::kv::index) blocks: [u64; Tier::COUNT],
    pub(in crate::kv::index) len: u64,
    /// Whether the memory limit took blocks since this was last asked.
    pub(in crate::kv::index) was_evicted: bool,
    /// The bytes that the writer's total has for this tree.
    pub(super) counted_bytes: usize,
}

impl TreeState {
    pub(super) fn new(slot: Slot) -> Self {
        Self {
            slot,
            pages: HashSet::default(),
            aliases: HashMap::default(),
            names: HashMap::default(),
            copies: HashMap::default(),
            blocks: [0; Tier::COUNT],
            len: 0,
            was_evicted: false,
            counted_bytes: 0,
        }
    }

    /// Whether the tree knows a block by its name in the name table, and has the copies that its residency stands for.
    #[inline]
    pub(super) fn is_plain(&self, block: BlockId) -> bool {
        !self.names.contains_key(&block) && !self.copies.contains_key(&block)
    }

    #[inline]
    pub(super) fn alias(&self, name: EngineHash) -> Option<BlockId> {
        self.aliases.get(&name).copied()
    }

    #[inline]
    pub(super) fn alias_of(&self, block: BlockId) -> Option<EngineHash> {
        self.names.get(&block).copied()
    }

    pub(super) fn set_alias(&mut self, block: BlockId, name: EngineHash) {
        self.aliases.insert(name, block);
        self.names.insert(block, name);
    }

    #[inline]
    pub(super) fn drop_alias(&mut self, block: BlockId) {
        if let Some(name) = self.names.remove(&block) {
            self.aliases.remove(&name);
        }
    }

    #[inline]
    pub(super) fn copies(&self, block: BlockId, residency: Option<Tier>) -> Copies {
        let noted = self.copies.get(&block).copied();
        noted.unwrap_or_else(|| default_copies(residency))
    }

    /// Notes a block's copies, and counts the tiers that it came to or left.
    #[inline]
    pub(super) fn set_copies(&mut self, block: BlockId, old: Copies, new: Copies) {
        for ((blocks, old), new) in self.blocks.iter_mut().zip(old).zip(new) {
            *blocks = *blocks + u64::from(new > 0) - u64::from(old > 0);
        }
        if new != default_copies(residency_of(new)) {
            self.copies.insert(block, new);
        } else if !self.copies.is_empty() {
            self.copies.remove(&block);
        }
    }

    /// Memory of the tree alone, without its share of pages and names.
    pub(super) fn bytes(&self) -> usize {
        self.pages.allocation_size()
            + self.aliases.allocation_size()
            + self.names.allocation_size()
            + self.copies.allocation_size()
            + size_of::<Self>()
    }

    /// Makes large tables larger for blocks that come, before lookups have to wait for it.
    pub(super) fn reserve(&mut self, blocks: usize) {
        fn reserve<K: Eq + Hash, V>(map: &mut HashMap<K, V, FxBuildHasher>, more: usize) {
            if map.len() > LARGE_TABLE {
                map.reserve(more);
            }
        }
        if self.pages.len() > LARGE_TABLE {
            self.pages.reserve(blocks);
        }
        reserve(&mut self.aliases, blocks);
        reserve(&mut self.names, blocks);
        reserve(&mut self.copies, blocks);
    }

    /// Gives memory back if most of it is unused.
    pub(super) fn shrink(&mut self) {
        fn shrink<K: Eq + Hash, V>(map: &mut HashMap<K, V, FxBuildHasher>) {
            if map.capacity() > 64 + map.len() * 4 {
                map.shrink_to(map.len() * 2);
            }
        }
        if self.pages.capacity() > 64 + self.pages.len() * 4 {
            self.pages.shrink_to(self.pages.len() * 2);
        }
        shrink(&mut self.aliases);
        shrink(&mut self.names);
        shrink(&mut self.copies);
    }
}
