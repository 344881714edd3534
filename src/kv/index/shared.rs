//! The part of an index that lookups read without a lock, and that the writer changes under them.

use std::sync::Arc;

use arc_swap::ArcSwap;

use super::budget::{MemoryAccount, MemoryBudget};
use super::owner_sets::OwnerSets;
use super::page_table::PageTable;
use super::pages::{CHUNK, Pages};
use super::tree_slots::TreeSlots;

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) pages: Pages,
    pub(super) sets: OwnerSets,
    pub(super) slots: TreeSlots,
    /// Pages that start a segment, by the path hash of their first block.
    pub(super) starts: ArcSwap<PageTable>,
    /// Pages that start within a segment, where a chain forks off another.
    pub(super) forks: ArcSwap<PageTable>,
    pub(super) memory: MemoryAccount,
}

impl Shared {
    pub(super) fn new(budget: Arc<MemoryBudget>) -> Self {
        // With more pages, numbers of blocks and sets would not fit their bits.
        const MAX_PAGES: u64 = 1 << 23;
        let max_pages = (budget.max_bytes() / Pages::BYTES as u64).min(MAX_PAGES);
        let table = || ArcSwap::from_pointee(PageTable::with_room_for(CHUNK));
        Self {
            pages: Pages::new(max_pages as usize),
            sets: OwnerSets::new(),
            slots: TreeSlots::new(),
            starts: table(),
            forks: table(),
            memory: MemoryAccount::new(budget),
        }
    }
}
