//! What goes into an index and comes out of it.

use crate::ids::WorkerId;
use crate::kv::block::{ChainRoot, LocalHash};
use crate::kv::event::{EngineHash, Tier};

/// What stored blocks continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parent {
    /// Nothing: they are a chain's first blocks.
    Root(ChainRoot),
    Block(EngineHash),
}

/// A block that a KV event reports as stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewBlock {
    pub name: EngineHash,
    pub local: LocalHash,
}

/// How many copies of a block a report stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyReport {
    OneMore,
    /// At least one, because the block may have been reported before. A block first reported so is
    /// forgotten at its first removal; the count of one that is counted already does not change.
    AtLeastOne,
}

/// The tree does not own the parent of the stored blocks, so their place in a chain is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the parent block is not known")]
pub struct UnknownParent;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeBlock {
    pub name: EngineHash,
    /// None for a chain's first block, and where the tree does not own the block before.
    pub parent: Option<EngineHash>,
    /// Path hash: stands for the block and everything before it.
    pub path: u64,
    /// Blocks before it.
    pub depth: u32,
    /// By tier; [`TreeBlock::UNKNOWN_COPIES`] for at least one.
    pub copies: [u32; Tier::COUNT],
}

impl TreeBlock {
    pub const UNKNOWN_COPIES: u32 = u32::MAX;
}

/// The prefix of a prompt that one dp rank of a worker has cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RankPrefix {
    pub worker: WorkerId,
    pub rank: u32,
    /// Its length, in whatever tier.
    pub blocks: u32,
    /// The leading part that is all in the GPU. Engines load everything after it from the lower
    /// tiers, even a block that is in the GPU but follows one that is not.
    pub gpu_blocks: u32,
    /// Of the rest, the blocks that are on disk only.
    pub disk_blocks: u32,
}

impl RankPrefix {
    /// Blocks that the CPU's memory has, or that are behind one that it must provide.
    pub fn cpu_blocks(&self) -> u32 {
        self.blocks - self.gpu_blocks - self.disk_blocks
    }
}

/// A tree's blocks, parents before children.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CopiedBlocks {
    pub runs: Vec<CopiedRun>,
    /// The blocks of all runs.
    pub blocks: Vec<NewBlock>,
    /// By tier, the copies of the blocks that have not exactly one in the GPU, by their position in `blocks`.
    /// [`TreeBlock::UNKNOWN_COPIES`] for at least one.
    pub copies: Vec<(u32, [u32; Tier::COUNT])>,
    /// Blocks that were left out because the tree does not have the block before them.
    pub orphans: u64,
}

/// Consecutive blocks of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopiedRun {
    pub parent: Parent,
    /// How many of the blocks are its.
    pub len: u32,
}

/// The copies of most blocks: one in the GPU.
pub(super) const USUAL_COPIES: [u32; Tier::COUNT] = [1, 0, 0];

impl CopiedBlocks {
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Adds a block that follows the last one, or begins a run.
    pub(super) fn push(
        &mut self,
        parent: Option<Parent>,
        block: NewBlock,
        copies: [u32; Tier::COUNT],
    ) {
        match (parent, self.runs.last_mut()) {
            (None, Some(run)) => run.len += 1,
            (Some(parent), _) => self.runs.push(CopiedRun { parent, len: 1 }),
            (None, None) => return,
        }
        if copies != USUAL_COPIES {
            self.copies.push((self.blocks.len() as u32, copies));
        }
        self.blocks.push(block);
    }
}
