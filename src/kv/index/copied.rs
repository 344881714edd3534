//! What a copy of a tree has, independent of any index.

use super::types::{NewBlock, Parent};
use crate::kv::event::Tier;

/// A tree's blocks, parents before children.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CopiedBlocks {
    pub runs: Vec<CopiedRun>,
    /// The blocks of all runs.
    pub blocks: Vec<NewBlock>,
    /// By tier, the copies of the blocks that have not exactly one in the GPU, by their position in `blocks`.
    /// [`super::TreeBlock::UNKNOWN_COPIES`] for at least one.
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
