//! What the writer knows of one tree beyond its bits in the holders' sets.

use rustc_hash::FxHashMap;

use crate::kv::event::{Name, Tier};
use crate::kv::index::holders::Mark;
use crate::kv::index::pages::{BlockId, NONE, PageId};
use crate::kv::index::simd::prefetch;

/// Copies of a block in each tier.
pub(super) type Copies = [u16; Tier::COUNT];

/// More copies than can be counted, or a block of which one was told again: gone when one goes.
pub(super) const UNKNOWN: u16 = u16::MAX;

/// Pages that are counted together.
const GROUP: usize = 8;

#[derive(Debug, Default)]
pub(in crate::kv::index) struct Known {
    /// How many blocks the tree holds of each page, in groups of eight pages: what is stored together
    /// mostly lies in pages that follow each other.
    pages: FxHashMap<u32, [u8; GROUP]>,
    /// Blocks that go by another name than the one in the common table, both ways.
    aliases: FxHashMap<Name, BlockId>,
    names: FxHashMap<BlockId, Name>,
    /// Where it is not what the mark alone says: [`usual`].
    copies: FxHashMap<BlockId, Copies>,
    pub(in crate::kv::index) blocks: [u64; Tier::COUNT],
    pub(in crate::kv::index) len: u64,
    /// The writer's clock at the last store.
    pub(super) stored_at: u64,
    pub(in crate::kv::index) was_cut: bool,
    /// Where stores ended, by the last block's name: most go on from there.
    ends: Ends,
    /// What it was counted with last.
    pub(super) counted_bytes: usize,
}

/// As many chains as one engine mostly works on at a time.
const ENDS: usize = 64;

/// A guess for a name, in a place of its hash: the name's other half, and the block.
#[derive(Debug)]
struct Ends([(u32, BlockId); ENDS]);

impl Default for Ends {
    fn default() -> Self {
        Self([(0, NONE); ENDS])
    }
}

impl Ends {
    #[inline]
    fn place(name: Name) -> (usize, u32) {
        let spread = name.0.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((spread >> 32) as usize % ENDS, (spread >> 38) as u32)
    }
}

/// What a mark says of the copies where nothing else is known.
pub(super) fn usual(mark: Mark) -> Copies {
    match mark {
        Mark::Absent => [0, 0, 0],
        Mark::Gpu => [1, 0, 0],
        Mark::Cpu => [0, 1, 0],
        Mark::Disk => [0, 0, 1],
    }
}

pub(super) fn mark_of(copies: Copies) -> Mark {
    match copies {
        [0, 0, 0] => Mark::Absent,
        [0, 0, _] => Mark::Disk,
        [0, _, _] => Mark::Cpu,
        _ => Mark::Gpu,
    }
}

impl Known {
    /// Asks for what a store reads of it.
    #[inline]
    pub(super) fn prefetch(&self) {
        prefetch(&self.pages);
        prefetch(&self.copies);
        prefetch(&self.stored_at);
    }

    /// The block that a store ended with under this name, as far as it is noted. It may be another's by
    /// now.
    #[inline]
    pub(super) fn end(&self, name: Name) -> BlockId {
        let (place, rest) = Ends::place(name);
        match self.ends.0[place] {
            (known, block) if known == rest => block,
            _ => NONE,
        }
    }

    #[inline]
    pub(super) fn set_end(&mut self, name: Name, block: BlockId) {
        let (place, rest) = Ends::place(name);
        self.ends.0[place] = (rest, block);
    }

    #[inline]
    pub(super) fn alias(&self, name: Name) -> Option<BlockId> {
        if self.aliases.is_empty() {
            return None;
        }
        self.aliases.get(&name).copied()
    }

    #[inline]
    pub(super) fn has_aliases(&self) -> bool {
        !self.aliases.is_empty()
    }

    #[inline]
    pub(super) fn has_alias(&self, block: BlockId) -> bool {
        !self.names.is_empty() && self.names.contains_key(&block)
    }

    pub(super) fn alias_of(&self, block: BlockId) -> Option<Name> {
        self.names.get(&block).copied()
    }

    pub(super) fn set_alias(&mut self, block: BlockId, name: Name) {
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
    pub(super) fn is_plain(&self) -> bool {
        self.copies.is_empty()
    }

    #[inline]
    pub(super) fn copies(&self, block: BlockId, mark: Mark) -> Copies {
        if !self.copies.is_empty()
            && let Some(copies) = self.copies.get(&block)
        {
            return *copies;
        }
        usual(mark)
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
        if new == usual(mark_of(new)) {
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

    #[inline]
    pub(super) fn discount_page(&mut self, page: PageId, fewer: usize) {
        self.len -= fewer as u64;
        if let Some(group) = self.pages.get_mut(&(page / GROUP as u32)) {
            group[page as usize % GROUP] -= fewer as u8;
            if *group == [0; GROUP] {
                self.pages.remove(&(page / GROUP as u32));
            }
        }
    }

    /// The pages that the tree holds any block of.
    pub(super) fn pages(&self) -> impl Iterator<Item = PageId> {
        self.pages.iter().flat_map(|(group, counts)| {
            let pages = (group * GROUP as u32..).zip(counts);
            pages.filter_map(|(page, count)| (*count > 0).then_some(page))
        })
    }

    /// Its own maps, without its part of what it shares.
    pub(in crate::kv::index) fn bytes(&self) -> usize {
        // A map has a byte of control for each place, and a seventh of places to spare.
        let of = |places: usize, entry: usize| places * 8 / 7 * (entry + 1);
        of(self.pages.capacity(), 4 + GROUP)
            + of(self.aliases.capacity(), 16)
            + of(self.names.capacity(), 16)
            + of(self.copies.capacity(), 12)
            + size_of::<Self>()
    }

    pub(super) fn shrink(&mut self) {
        self.pages.shrink_to_fit();
        self.aliases.shrink_to_fit();
        self.names.shrink_to_fit();
        self.copies.shrink_to_fit();
    }
}
