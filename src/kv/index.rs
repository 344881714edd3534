//! The prefix index: which workers have cached how many of a prompt's first blocks, over all workers
//! of one model and block size.
//!
//! One writer at a time changes it ([`Tree`] is the handle of one dp rank); lookups take no lock.
//! Blocks lie in pages of up to 16 consecutive blocks of a chain (`pages`). A lookup finds a page by
//! the path hash of its first block (`page_table`), and beside each block the set of trees that own
//! it (`owner_sets`). There are no links from block to block: a block's path hash stands for
//! everything before it.

mod budget;
mod interner;
mod lookup;
mod members;
mod metrics;
mod name_table;
mod owner_sets;
mod page_table;
mod pages;
mod prefix_index;
mod race_point;
mod shared;
mod simd;
mod sync;
mod tree;
mod tree_copy;
mod tree_slots;
mod types;
mod writer;

pub(super) use self::budget::MemoryBudget;
pub use self::budget::PageMemory;
pub use self::metrics::IndexKey;
pub(super) use self::metrics::Metrics;
pub use self::prefix_index::PrefixIndex;
pub(super) use self::simd::prefetch;
pub use self::tree::Tree;
pub use self::tree_copy::{CopyCursor, GraftCursor};
pub use self::types::{
    CopiedBlocks, CopiedRun, CopyReport, NewBlock, Parent, RankPrefix, TreeBlock, UnknownParent,
};

#[cfg(test)]
mod tests;
