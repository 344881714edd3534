//! What only the writer needs of a page.

use crate::kv::block::SEGMENT_BLOCKS;
use crate::kv::index::pages::{BlockId, CHUNK, PageId};

#[derive(Clone, Debug, Default)]
pub(super) struct PageMeta {
    /// The path hash before the first block.
    pub(super) parent_path: u64,
    /// The block before the first one, as it was once: a guess.
    pub(super) parent: BlockId,
    /// Blocks before the first one.
    pub(super) depth: u32,
    /// The writer's clock when a block of the page was stored last. Before an eviction also: when one that continues
    /// the page's chain was.
    pub(super) stored_at: u64,
    /// Which of the blocks' names are in the name table, a bit each.
    pub(super) named: u32,
    /// Blocks that any tree owns. `named` and `owned` are no shorter than a register: loading both
    /// after a store to one would wait for the store.
    pub(super) owned: u32,
}

/// Meta data and names side by side: a look at a block far away then costs the processor one address
/// translation instead of two.
#[derive(Clone, Debug, Default)]
pub(super) struct PageRow {
    pub(super) meta: PageMeta,
    pub(super) names: [u64; SEGMENT_BLOCKS],
}

/// The rows of a chunk of pages.
#[derive(Debug)]
pub(super) struct RowChunk {
    pub(super) rows: Box<[PageRow]>,
}

impl RowChunk {
    pub(super) const BYTES: usize = CHUNK * size_of::<PageRow>();

    pub(super) fn new() -> Self {
        Self {
            rows: vec![PageRow::default(); CHUNK].into(),
        }
    }

    /// Whether the name table has this name for a page's block.
    #[inline]
    pub(super) fn has_name(&self, page: PageId, offset: usize, name: u64) -> bool {
        let page = page as usize % CHUNK;
        let row = &self.rows[page];
        row.names[offset] == name && row.meta.named >> offset & 1 == 1
    }
}
