//! One index: what lookups read, beside the writer behind its lock.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use parking_lot::{Mutex, MutexGuard};
use tracing::warn;

use super::budget::MemoryBudget;
use super::metrics::{IndexKey, Metrics};
use super::owner_sets::{MAX_TREES, NO_SLOT, Slot};
use super::shared::Shared;
use super::types::{RankPrefix, TreeBlock};
use super::writer::Writer;
use super::writer::list::Listing;
use crate::ids::WorkerId;
use crate::kv::block::{ChainRoot, LocalHash};

/// Pages that are listed before events get their turn: some 4,000 blocks.
const PAGES_AT_ONCE: usize = 256;

#[derive(Debug)]
pub struct PrefixIndex {
    shared: Shared,
    writer: Mutex<Writer>,
    trees: AtomicUsize,
    metrics: Metrics,
    key: IndexKey,
}

impl PrefixIndex {
    pub(in crate::kv) fn new(budget: Arc<MemoryBudget>, metrics: Metrics, key: IndexKey) -> Self {
        let shared = Shared::new(budget);
        Self {
            writer: Mutex::new(Writer::new(&shared)),
            shared,
            trees: AtomicUsize::new(0),
            metrics,
            key,
        }
    }

    /// Adds, in no order, the prefix of this prompt that each visible tree owns. Takes no lock; blocks
    /// that are being stored at this moment may be missed.
    pub fn overlap(&self, root: ChainRoot, locals: &[LocalHash], found: &mut Vec<RankPrefix>) {
        self.shared.overlap(root, locals, found);
    }

    /// Blocks that any tree owns.
    pub fn len(&self) -> u64 {
        self.writer().blocks
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn memory_bytes(&self) -> usize {
        let fixed = self.shared.pages.own_bytes() + size_of::<Self>();
        fixed + self.writer().bytes()
    }

    pub(in crate::kv) fn has_trees(&self) -> bool {
        self.trees.load(Relaxed) > 0
    }

    /// The blocks of one dp rank; none if it has no tree here. Events are applied meanwhile: a block that is stored or
    /// removed while the others are listed may be missing or not.
    pub(in crate::kv) fn list_of(&self, worker: WorkerId, rank: u32) -> Vec<TreeBlock> {
        self.list_in_slices(worker, rank, || {})
    }

    /// Calls `between` after each slice, with the writer's lock free.
    pub(super) fn list_in_slices(
        &self,
        worker: WorkerId,
        rank: u32,
        mut between: impl FnMut(),
    ) -> Vec<TreeBlock> {
        let find = || self.shared.slots.find(worker, rank);
        let pages = self.read(|writer, _| find().map(|slot| writer.pages_of(slot)));
        let mut listing = Listing::default();
        for slice in pages.unwrap_or_default().chunks(PAGES_AT_ONCE) {
            let writer = self.writer();
            let Some(slot) = find() else {
                break;
            };
            for page in slice {
                writer.list_page(&self.shared, slot, *page, &mut listing);
            }
            // To the event that waits, if there is one.
            MutexGuard::unlock_fair(writer);
            between();
        }
        listing.finish()
    }

    /// A slot for a new tree, invisible to lookups; [`NO_SLOT`] if the index has none left.
    pub(super) fn add_slot(&self, worker: WorkerId, rank: u32) -> Slot {
        self.trees.fetch_add(1, Relaxed);
        let slot = self.writer().add_tree(&self.shared, worker, rank);
        slot.unwrap_or_else(|| {
            warn!(
                %worker,
                rank,
                max_ranks = MAX_TREES,
                "KV index can track no more dp ranks; routing sees nothing cached at this rank"
            );
            NO_SLOT
        })
    }

    pub(super) fn remove_slot(&self, slot: Slot) {
        if slot != NO_SLOT {
            self.write(|writer, shared| writer.remove_tree(shared, slot));
        }
        self.trees.fetch_sub(1, Relaxed);
    }

    pub(super) fn writer(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock()
    }

    pub(super) fn read<T>(&self, read: impl FnOnce(&Writer, &Shared) -> T) -> T {
        read(&self.writer(), &self.shared)
    }

    /// Changes the index, then accounts for its memory and blocks.
    #[inline]
    pub(super) fn write<T>(&self, write: impl FnOnce(&mut Writer, &Shared) -> T) -> T {
        let mut writer = self.writer();
        let before = writer.blocks;
        let result = write(&mut writer, &self.shared);
        writer.charge(&self.shared);
        self.metrics.update_blocks(before, writer.blocks);
        let dropped = std::mem::take(&mut writer.dropped_blocks);
        drop(writer);
        if dropped > 0 {
            self.metrics.count_dropped(dropped, &self.key);
        }
        result
    }
}

impl Drop for PrefixIndex {
    fn drop(&mut self) {
        self.metrics.update_blocks(self.writer.get_mut().blocks, 0);
    }
}
