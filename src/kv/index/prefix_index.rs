//! One index: the pages that lookups read, and the writer. Each is behind a lock of its own; whoever takes both takes
//! the writer's first.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use parking_lot::{Mutex, MutexGuard, RwLock};
use tracing::warn;

use super::budget::MemoryBudget;
use super::metrics::{IndexKey, Metrics};
use super::pages::{Pages, Slot};
use super::types::{RankPrefix, TreeBlock};
use super::writer::list::Listing;
use super::writer::{MAX_TREES, Writer};
use crate::ids::WorkerId;
use crate::kv::block::{ChainRoot, LocalHash};

/// Pages that are listed before events get their turn: some 4,000 blocks.
const PAGES_AT_ONCE: usize = 256;

#[derive(Debug)]
pub struct PrefixIndex {
    pages: RwLock<Pages>,
    writer: Mutex<Writer>,
    trees: AtomicUsize,
    metrics: Metrics,
    key: IndexKey,
}

impl PrefixIndex {
    pub(in crate::kv) fn new(budget: Arc<MemoryBudget>, metrics: Metrics, key: IndexKey) -> Self {
        Self {
            pages: RwLock::default(),
            writer: Mutex::new(Writer::new(budget)),
            trees: AtomicUsize::new(0),
            metrics,
            key,
        }
    }

    /// Adds, in no order, the prefix of this prompt that each visible tree owns: all of them as they are at one moment.
    /// Of a long event that is being applied, or a tree that is being dropped, that may be a part.
    pub fn overlap(&self, root: ChainRoot, locals: &[LocalHash], found: &mut Vec<RankPrefix>) {
        self.pages.read().overlap(root, locals, found);
    }

    /// Blocks that any tree owns.
    pub fn len(&self) -> u64 {
        self.writer().blocks
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn memory_bytes(&self) -> usize {
        size_of::<Self>() + self.read(|writer, pages| writer.bytes(pages))
    }

    pub(in crate::kv) fn has_trees(&self) -> bool {
        self.trees.load(Relaxed) > 0
    }

    /// The blocks of one dp rank; none if it has no tree here. Events are applied meanwhile: a block that is stored or
    /// removed while the others are listed may be missing or not. Calls `between` after each slice, with the writer's lock
    /// free.
    pub(in crate::kv) fn list_in_slices(
        &self,
        worker: WorkerId,
        rank: u32,
        mut between: impl FnMut(),
    ) -> Vec<TreeBlock> {
        let find = |pages: &Pages| pages.slot_of(worker, rank);
        let pages = self.read(|writer, pages| find(pages).map(|slot| writer.pages_of(slot)));
        let mut listing = Listing::default();
        for slice in pages.unwrap_or_default().chunks(PAGES_AT_ONCE) {
            let writer = self.writer();
            let pages = self.pages.read();
            let Some(slot) = find(&pages) else {
                break;
            };
            for page in slice {
                writer.list_page(&pages, slot, *page, &mut listing);
            }
            drop(pages);
            // To the event that waits, if there is one.
            MutexGuard::unlock_fair(writer);
            between();
        }
        listing.finish()
    }

    /// A slot for a new tree, invisible to lookups; none if the index has none left.
    pub(super) fn add_slot(&self, worker: WorkerId, rank: u32) -> Option<Slot> {
        self.trees.fetch_add(1, Relaxed);
        let slot = self
            .writer()
            .add_tree(&mut self.pages.write(), worker, rank);
        if slot.is_none() {
            warn!(
                %worker,
                rank,
                max_ranks = MAX_TREES,
                "KV index can track no more dp ranks; routing sees nothing cached at this rank"
            );
        }
        slot
    }

    pub(super) fn remove_slot(&self, slot: Option<Slot>) {
        if let Some(slot) = slot {
            self.write(|writer, pages| writer.remove_tree(pages, slot));
        }
        self.trees.fetch_sub(1, Relaxed);
    }

    pub(super) fn set_visible(&self, slot: Slot, is_visible: bool) {
        // As for all changes: lookups do not wait behind whoever reads all pages with the writer's lock.
        let _writer = self.writer();
        if let Some(rank) = &mut self.pages.write().slots[slot as usize] {
            rank.is_visible = is_visible;
        }
    }

    fn writer(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock()
    }

    pub(super) fn read<T>(&self, read: impl FnOnce(&Writer, &Pages) -> T) -> T {
        let writer = self.writer();
        read(&writer, &self.pages.read())
    }

    /// Changes the index, then accounts for its memory and blocks.
    #[inline]
    pub(super) fn write<T>(&self, write: impl FnOnce(&mut Writer, &RwLock<Pages>) -> T) -> T {
        let mut writer = self.writer();
        let before = writer.blocks;
        let result = write(&mut writer, &self.pages);
        writer.charge(&self.pages.read());
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
