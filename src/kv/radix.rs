//! What one rank of one worker holds, as a value: its events are applied to it, and dropping it makes
//! the index forget all of it. It judges no order and no identity; that is for [`super::stream`].

use std::fmt;
use std::sync::Arc;

use super::block::{Local, Root};
use super::event::{Name, Tier};
use super::index::Index;

/// One rank's blocks. They lie in the index that it was planted in, beside everybody else's.
#[derive(Debug)]
pub struct Tree {
    index: Arc<Index>,
    slot: u32,
}

/// What new blocks follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// They are a chain's first.
    Root(Root),
    Block(Name),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewBlock {
    pub name: Name,
    pub local: Local,
}

/// What a report of a block says of its copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copies {
    /// There is one more.
    Counted,
    /// There is one at least: it was told again. A block first learnt so is forgotten at its first
    /// removal; one that is counted already stays as it is.
    Unknown,
}

/// The block that new ones follow is not held, so their place is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownParent;

impl fmt::Display for UnknownParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the parent block is not known")
    }
}

impl std::error::Error for UnknownParent {}

/// A held block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    pub name: Name,
    /// None for a chain's first block, and where the one before is not held.
    pub parent: Option<Name>,
    /// Stands for the block and all before it.
    pub path: u64,
    /// Blocks before it.
    pub depth: u32,
    /// By tier; [`Listed::UNKNOWN`] where it is one at least.
    pub copies: [u32; Tier::COUNT],
}

impl Listed {
    pub const UNKNOWN: u32 = u32::MAX;
}

impl Tree {
    pub(super) fn new(index: Arc<Index>, slot: u32) -> Self {
        Self { index, slot }
    }

    /// One more copy of each block, in order. A tree knows a block by one name and by a name one
    /// block: what the name stood for before is forgotten.
    pub fn store(
        &mut self,
        after: After,
        blocks: &[NewBlock],
        tier: Tier,
        copies: Copies,
    ) -> Result<(), UnknownParent> {
        self.index.store(self.slot, after, blocks, tier, copies)
    }

    /// One copy less of each. Returns how many of them were not held in that tier.
    pub fn remove(&mut self, names: &[Name], tier: Tier) -> usize {
        self.index.remove(self.slot, names, tier)
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.index.clear(self.slot);
    }

    /// Whether lookups see it. They do not at first.
    pub fn set_scoring(&mut self, is_scoring: bool) {
        self.index.set_scoring(self.slot, is_scoring);
    }

    /// Blocks held in each tier.
    pub fn blocks(&self) -> [u64; Tier::COUNT] {
        self.index.blocks(self.slot)
    }

    /// Blocks held in any tier.
    pub fn len(&self) -> u64 {
        self.index.tree_len(self.slot)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its share of the index's memory.
    pub fn memory_bytes(&self) -> usize {
        self.index.tree_bytes(self.slot)
    }

    /// All blocks as they are now, parents before children.
    pub fn list(&self) -> impl Iterator<Item = Listed> + use<> {
        self.index.list(self.slot).into_iter()
    }

    /// Whether the memory bound took blocks from it since this was last asked.
    pub fn was_cut(&mut self) -> bool {
        self.index.was_cut(self.slot)
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        self.index.fell(self.slot);
    }
}
