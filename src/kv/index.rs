//! The prefix index: which workers have cached how many of a prompt's first blocks, over all workers
//! of one model and block size.
//!
//! Blocks lie in pages of up to 16 consecutive blocks of a chain (`pages`), each with a list of the trees that own its
//! blocks. A lookup finds a page by the path hash of its first block. One writer at a time changes the index
//! ([`Tree`] is the handle of one dp rank), and locks the pages for a few blocks at a time; lookups share that lock, so
//! each sees one moment.

mod budget;
mod lookup;
mod metrics;
mod pages;
mod prefix_index;
mod tree;
mod tree_copy;
mod types;
mod writer;

pub use self::budget::MemoryAccount;
pub(super) use self::budget::MemoryBudget;
pub use self::metrics::IndexKey;
pub(super) use self::metrics::Metrics;
pub use self::prefix_index::PrefixIndex;
pub use self::tree::Tree;
pub use self::tree_copy::{CopyCursor, GraftCursor};
pub use self::types::{
    CopiedBlocks, CopiedRun, CopyReport, NewBlock, Parent, RankPrefix, TreeBlock, UnknownParent,
};

#[cfg(test)]
mod tests;
