//! What the writer knows of one tree besides its bits in the owner sets.

use std::hash::Hash;

use rustc_hash::FxHashMap;

use super::copies::{Copies, StoreContext, default_copies, residency_of};
use crate::kv::event::{EngineHash, Tier};
use crate::kv::index::owner_sets::Residency;
use crate::kv::index::pages::{BlockId, NO_ID, PageId};
use crate::kv::index::simd::prefetch;

/// Pages that share an entry of [`TreeState::pages`].
const GROUP: usize = 8;

#[derive(Debug, Default)]
pub(in crate::kv::index) struct TreeState {
    /// How many blocks of each page the tree owns, by groups of eight pages: what is stored together
    /// usually lies in pages that follow each other.
    pages: FxHashMap<u32, [u8; GROUP]>,
    /// Blocks that the tree knows by another name than the name table has, both ways.
    aliases: FxHashMap<EngineHash, BlockId>,
    names: FxHashMap<BlockId, EngineHash>,
    /// Copies of blocks that have other than the [`default_copies`] of their residency.
    copies: FxHashMap<BlockId, Copies>,
    /// Blocks in each tier, and in any.
    pub(in crate::kv::index) blocks: [u64; Tier::COUNT],
    pub(in crate::kv::index) len: u64,
    /// Whether the memory limit took blocks since this was last asked.
    pub(in crate::kv::index) was_evicted: bool,
    ends: ChainEnds,
    /// The block before the one that was removed last: a guess at the one that is removed next.
    pub(super) next_removed: Option<BlockId>,
    /// The bytes that the writer's total has for this tree.
    pub(super) counted_bytes: usize,
}

/// As many chains as one engine usually works on at a time.
const ENDS: usize = 64;

/// Where the last stores ended, since most stores continue there: a small cache from the last block's
/// name to the block, indexed by the name's hash. Entries have another part of the hash and a guess.
#[derive(Debug)]
struct ChainEnds([(u32, BlockId); ENDS]);

impl Default for ChainEnds {
    fn default() -> Self {
        Self([(0, NO_ID); ENDS])
    }
}

impl ChainEnds {
    #[inline]
    fn position(name: EngineHash) -> (usize, u32) {
        let spread = name.0.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((spread >> 32) as usize % ENDS, (spread >> 38) as u32)
    }
}

impl TreeState {
    /// Asks for the cache lines that a store reads.
    #[inline]
    pub(super) fn prefetch(&self) {
        prefetch(&self.pages);
        prefetch(&self.copies);
    }

    /// The block that a store ended with under this name, if it is noted. A guess: the block may have
    /// been reused.
    #[inline]
    pub(super) fn chain_end(&self, name: EngineHash) -> BlockId {
        let (position, rest) = ChainEnds::position(name);
        match self.ends.0[position] {
            (known, block) if known == rest => block,
            _ => NO_ID,
        }
    }

    #[inline]
    pub(super) fn set_chain_end(&mut self, name: EngineHash, block: BlockId) {
        let (position, rest) = ChainEnds::position(name);
        self.ends.0[position] = (rest, block);
    }

    #[inline]
    pub(super) fn alias(&self, name: EngineHash) -> Option<BlockId> {
        if self.aliases.is_empty() {
            return None;
        }
        self.aliases.get(&name).copied()
    }

    #[inline]
    pub(super) fn has_alias(&self, block: BlockId) -> bool {
        !self.names.is_empty() && self.names.contains_key(&block)
    }

    /// Whether the tree knows a block by its name in the name table, and has the copies that its residency stands for.
    #[inline]
    pub(super) fn is_plain(&self, block: BlockId) -> bool {
        !self.has_alias(block) && (self.copies.is_empty() || !self.copies.contains_key(&block))
    }

    pub(super) fn alias_of(&self, block: BlockId) -> Option<EngineHash> {
        self.names.get(&block).copied()
    }

    pub(super) fn set_alias(&mut self, block: BlockId, name: EngineHash) {
        self.drop_alias(block);
        self.aliases.insert(name, block);
        self.names.insert(block, name);
    }

    #[inline]
    pub(super) fn drop_alias(&mut self, block: BlockId) {
        if !self.names.is_empty()
            && let Some(name) = self.names.remove(&block)
        {
            self.aliases.remove(&name);
        }
    }

    #[inline]
    pub(super) fn copies(&self, block: BlockId, residency: Residency) -> Copies {
        if !self.copies.is_empty()
            && let Some(copies) = self.copies.get(&block)
        {
            return *copies;
        }
        default_copies(residency)
    }

    /// Counts the copies of a block that the tree did not own before.
    #[inline]
    pub(super) fn count_first_copies(&mut self, store: StoreContext, block: BlockId) {
        if store.is_default {
            self.blocks[store.tier as usize] += 1;
        } else {
            self.set_copies(block, [0; Tier::COUNT], store.initial_copies);
        }
    }

    /// Notes a block's copies, and counts the tiers that it came to or left.
    pub(super) fn set_copies(&mut self, block: BlockId, old: Copies, new: Copies) {
        for tier in Tier::ALL {
            let tier = tier as usize;
            match (old[tier] > 0, new[tier] > 0) {
                (false, true) => self.blocks[tier] += 1,
                (true, false) => self.blocks[tier] -= 1,
                _ => {}
            }
        }
        if new == default_copies(residency_of(new)) {
            if !self.copies.is_empty() {
                self.copies.remove(&block);
            }
        } else {
            self.copies.insert(block, new);
        }
    }

    #[inline]
    pub(super) fn count_page(&mut self, page: PageId, more: usize) {
        if more > 0 {
            let group = self.pages.entry(page / GROUP as u32);
            group.or_default()[page as usize % GROUP] += more as u8;
            self.len += more as u64;
        }
    }

    /// Returns whether the tree has no block left in some group of pages.
    #[inline]
    pub(super) fn discount_page(&mut self, page: PageId, fewer: usize) -> bool {
        self.len -= fewer as u64;
        if let Some(group) = self.pages.get_mut(&(page / GROUP as u32)) {
            group[page as usize % GROUP] -= fewer as u8;
            if *group == [0; GROUP] {
                self.pages.remove(&(page / GROUP as u32));
                return true;
            }
        }
        false
    }

    /// The pages of which the tree owns any block.
    pub(super) fn pages(&self) -> impl Iterator<Item = PageId> {
        self.pages.iter().flat_map(|(group, counts)| {
            let pages = (group * GROUP as u32..).zip(counts);
            pages.filter_map(|(page, count)| (*count > 0).then_some(page))
        })
    }

    /// Memory of the tree alone, without its share of pages and names.
    pub(in crate::kv::index) fn bytes(&self) -> usize {
        // A map has a control byte for each entry, and room for a seventh more.
        let of = |entries: usize, bytes: usize| entries * 8 / 7 * (bytes + 1);
        of(self.pages.capacity(), 4 + GROUP)
            + of(self.aliases.capacity(), 16)
            + of(self.names.capacity(), 16)
            + of(self.copies.capacity(), 12)
            + size_of::<Self>()
    }

    /// Gives memory back if most of it is unused.
    pub(super) fn shrink_if_sparse(&mut self) {
        fn shrink<K: Eq + Hash, V>(map: &mut FxHashMap<K, V>) {
            if map.capacity() > 64 + map.len() * 4 {
                map.shrink_to(map.len() * 2);
            }
        }
        shrink(&mut self.pages);
        shrink(&mut self.aliases);
        shrink(&mut self.names);
        shrink(&mut self.copies);
    }

    pub(super) fn shrink(&mut self) {
        self.pages.shrink_to_fit();
        self.aliases.shrink_to_fit();
        self.names.shrink_to_fit();
        self.copies.shrink_to_fit();
    }
}
