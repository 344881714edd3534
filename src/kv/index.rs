//! Who holds how much of a prompt, over all workers of one model and block size.
//!
//! Trees ([`super::radix::Tree`]) write, one at a time; lookups take no lock. Blocks lie in pages of
//! up to 16 that follow each other in a chain (`pages`), found by the path of a page's first block
//! (`table`), with the set of their holders beside each (`holders`). There is no link from block
//! to block: a block is told by its path, which stands for all before it.

pub(super) mod budget;
mod holders;
mod lookup;
mod names;
mod pages;
mod pause;
mod roster;
mod simd;
mod table;
mod writer;

use std::sync::{Arc, Weak};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tracing::warn;

use self::budget::{Account, Budget};
use self::holders::Sets;
use self::pages::{CHUNK, Pages};
use self::roster::Roster;
use self::table::Table;
use self::writer::Writer;
use super::block::{Local, Root};
use super::event::{Name, Tier};
use super::forest::{Forest, Metrics};
use super::radix::{After, Copies, Listed, NewBlock, Tree, UnknownParent};
use crate::ids::WorkerId;

/// How many of a prompt's first blocks one rank of a worker holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Depth {
    pub worker: WorkerId,
    pub rank: u32,
    /// In any tier.
    pub blocks: u32,
    /// All in the GPU. What follows must be brought there, also what is there itself but lies behind
    /// a block that is not: engines go on from the first of those with what lower tiers have.
    pub gpu_blocks: u32,
    /// Those of the others that are on disk only.
    pub disk_blocks: u32,
}

impl Depth {
    /// Those that the CPU's memory has, or will have given.
    pub fn cpu_blocks(&self) -> u32 {
        self.blocks - self.gpu_blocks - self.disk_blocks
    }
}

#[derive(Debug)]
pub struct Index {
    shared: Shared,
    writer: Mutex<Writer>,
    metrics: Metrics,
    forest: Weak<Forest>,
    key: super::forest::Key,
}

/// What readers see.
#[derive(Debug)]
struct Shared {
    pages: Pages,
    sets: Sets,
    roster: Roster,
    starts: ArcSwap<Table>,
    forks: ArcSwap<Table>,
    budget: Account,
}

impl Index {
    pub(super) fn new(
        budget: Arc<Budget>,
        metrics: Metrics,
        forest: Weak<Forest>,
        key: super::forest::Key,
    ) -> Self {
        // More than this, and numbers of blocks and sets would not fit their words.
        const PAGES_MAX: u64 = 1 << 23;
        let pages_max = (budget.bytes_max() / Pages::BYTES as u64).min(PAGES_MAX);
        let table = || Arc::new(Table::with_room_for(CHUNK));
        let (starts, forks) = (table(), table());
        Self {
            writer: Mutex::new(Writer::new(starts.clone(), forks.clone())),
            shared: Shared {
                pages: Pages::new(pages_max as usize),
                sets: Sets::new(),
                roster: Roster::new(),
                starts: ArcSwap::new(starts),
                forks: ArcSwap::new(forks),
                budget: Account::new(budget),
            },
            metrics,
            forest,
            key,
        }
    }

    /// A tree for one rank of a worker. It does not score yet.
    pub fn plant(self: &Arc<Self>, worker: WorkerId, rank: u32) -> Tree {
        if let Some(forest) = self.forest.upgrade() {
            forest.planted(&self.key, self);
        }
        let slot = self.writer.lock().plant(&self.shared, worker, rank);
        if slot.is_none() {
            warn!(%worker, rank, "too many trees in one index; this one stays empty");
        }
        Tree::new(self.clone(), slot.unwrap_or(u32::MAX))
    }

    /// Adds, in no order, how deep each tree that scores holds this prompt. Takes no lock; what is
    /// stored just now may be missed.
    pub fn overlap(&self, root: Root, locals: &[Local], found: &mut Vec<Depth>) {
        self.shared.overlap(root, locals, found);
    }

    /// Blocks that any tree holds.
    pub fn len(&self) -> u64 {
        self.writer.lock().blocks
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn memory_bytes(&self) -> usize {
        let fixed = self.shared.pages.own_bytes() + size_of::<Self>();
        fixed + self.writer.lock().bytes()
    }

    pub(super) fn store(
        &self,
        slot: u32,
        after: After,
        blocks: &[NewBlock],
        tier: Tier,
        copies: Copies,
    ) -> Result<(), UnknownParent> {
        self.write(|writer, shared| writer.store(shared, slot, after, blocks, tier, copies))
    }

    pub(super) fn remove(&self, slot: u32, names: &[Name], tier: Tier) -> usize {
        self.write(|writer, shared| writer.remove(shared, slot, names, tier))
    }

    pub(super) fn clear(&self, slot: u32) {
        self.write(|writer, shared| writer.clear(shared, slot));
    }

    pub(super) fn fell(&self, slot: u32) {
        if slot != u32::MAX {
            self.write(|writer, shared| writer.fell(shared, slot));
        }
        if let Some(forest) = self.forest.upgrade() {
            forest.felled(&self.key);
        }
    }

    pub(super) fn set_scoring(&self, slot: u32, is_scoring: bool) {
        let _writer = self.writer.lock();
        self.shared.roster.set_scoring(slot, is_scoring);
    }

    pub(super) fn list(&self, slot: u32) -> Vec<Listed> {
        self.writer.lock().list(&self.shared, slot)
    }

    /// The blocks of the tree of one rank; none where there is no such tree.
    pub(super) fn list_of(&self, worker: WorkerId, rank: u32) -> Vec<Listed> {
        let writer = self.writer.lock();
        match self.shared.roster.slot_of(worker, rank) {
            Some(slot) => writer.list(&self.shared, slot),
            None => Vec::new(),
        }
    }

    pub(super) fn blocks(&self, slot: u32) -> [u64; Tier::COUNT] {
        let writer = self.writer.lock();
        writer.tree(slot).map_or([0; 3], |tree| tree.blocks)
    }

    pub(super) fn tree_len(&self, slot: u32) -> u64 {
        let writer = self.writer.lock();
        writer.tree(slot).map_or(0, |tree| tree.len)
    }

    /// A tree's own maps, and its part of what it shares.
    pub(super) fn tree_bytes(&self, slot: u32) -> usize {
        let writer = self.writer.lock();
        writer.tree(slot).map_or(0, |tree| {
            let share = writer.bytes() as u64 * tree.len / writer.memberships.max(1);
            share as usize
        })
    }

    pub(super) fn was_cut(&self, slot: u32) -> bool {
        let mut writer = self.writer.lock();
        let tree = writer.tree_mut(slot);
        tree.is_some_and(|tree| std::mem::take(&mut tree.was_cut))
    }

    #[inline]
    fn write<T>(&self, write: impl FnOnce(&mut Writer, &Shared) -> T) -> T {
        let mut writer = self.writer.lock();
        let before = writer.blocks;
        let result = write(&mut writer, &self.shared);
        writer.charge(&self.shared);
        self.metrics.count(before, writer.blocks);
        let cut = std::mem::take(&mut writer.cut_blocks);
        drop(writer);
        if cut > 0 {
            self.metrics.cut(cut, &self.key);
        }
        result
    }
}

impl Drop for Index {
    fn drop(&mut self) {
        self.metrics.count(self.writer.get_mut().blocks, 0);
    }
}

#[cfg(test)]
mod tests;
