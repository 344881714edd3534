//! Which dp rank a tree's slot stands for.
//!
//! Slots are reused. A tree's bits are cleared in all owner sets before its slot is free, and a lookup
//! leaves out trees that were added after it took its snapshot, so bits of an old tree are never taken
//! for those of the next one.

use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::owner_sets::{MAX_TREES, Slot, TREES_PER_WORD};
use super::race_point::race_point;
use super::sync::{AtomicU64, AtomicUsize, fence};
use crate::ids::WorkerId;

/// A group's slots are made at once, so that the trees of one word of a set lie together.
const GROUP: usize = TREES_PER_WORD;

#[derive(Debug, Default)]
struct SlotEntry {
    /// Number of the tree among all ever added, doubled, plus one if it is visible; 0 for no tree.
    state: AtomicU64,
    /// Worker above rank.
    rank: AtomicU64,
}

#[derive(Debug)]
pub(super) struct TreeSlots {
    groups: Box<[OnceLock<Box<[SlotEntry; GROUP]>>]>,
    /// Trees ever added.
    added: AtomicU64,
    /// Slots ever used.
    end: AtomicUsize,
}

/// The trees that exist when a lookup starts.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotsSnapshot {
    added: u64,
    pub(super) groups: usize,
}

impl TreeSlots {
    pub(super) fn new() -> Self {
        Self {
            groups: (0..MAX_TREES.div_ceil(GROUP))
                .map(|_| OnceLock::new())
                .collect(),
            added: AtomicU64::new(0),
            end: AtomicUsize::new(0),
        }
    }

    #[inline]
    pub(super) fn snapshot(&self) -> SlotsSnapshot {
        let added = self.added.load(Acquire);
        SlotsSnapshot {
            added,
            groups: self.end.load(Relaxed).div_ceil(GROUP),
        }
    }

    /// Calls `each` for the visible trees among some of a group (a bit for each) that were there when
    /// the snapshot was taken.
    #[inline]
    pub(super) fn for_each(
        &self,
        snapshot: SlotsSnapshot,
        group: usize,
        mut trees: u64,
        mut each: impl FnMut(Slot, WorkerId, u32),
    ) {
        let Some(entries) = self.groups.get(group).and_then(OnceLock::get) else {
            return;
        };
        while trees != 0 {
            let position = trees.trailing_zeros() as usize;
            trees &= trees - 1;
            let Some(entry) = entries.get(position) else {
                return;
            };
            let state = entry.state.load(Acquire);
            race_point();
            let rank = entry.rank.load(Relaxed);
            fence(Acquire);
            let is_same = entry.state.load(Relaxed) == state;
            let is_visible = state & 1 == 1;
            let was_there = state >> 1 <= snapshot.added;
            if is_same && is_visible && was_there {
                let slot = (group * GROUP + position) as Slot;
                each(slot, WorkerId((rank >> 32) as u32), rank as u32);
            }
        }
    }

    /// Only the writer calls this and everything below.
    pub(super) fn add(&self, slot: Slot, worker: WorkerId, rank: u32) {
        self.groups[slot as usize / GROUP]
            .get_or_init(|| Box::new(std::array::from_fn(|_| SlotEntry::default())));
        let entry = self.entry(slot).expect("its group was just made");
        let number = self.added.load(Relaxed) + 1;
        entry.state.store(0, Relaxed);
        fence(Release);
        entry.rank.store(packed(worker, rank), Relaxed);
        entry.state.store(number << 1, Release);
        let end = self.end.load(Relaxed).max(slot as usize + 1);
        self.end.store(end, Relaxed);
        // Whoever sees this number also sees the bits of the slot's last tree cleared, which was before.
        self.added.store(number, Release);
    }

    /// The slot of one dp rank.
    pub(super) fn find(&self, worker: WorkerId, rank: u32) -> Option<Slot> {
        (0..self.end.load(Relaxed) as Slot).find(|slot| {
            self.entry(*slot).is_some_and(|entry| {
                let is_used = entry.state.load(Relaxed) != 0;
                is_used && entry.rank.load(Relaxed) == packed(worker, rank)
            })
        })
    }

    pub(super) fn set_visible(&self, slot: Slot, is_visible: bool) {
        if let Some(entry) = self.entry(slot) {
            let state = entry.state.load(Relaxed);
            entry
                .state
                .store(state & !1 | u64::from(is_visible), Release);
        }
    }

    pub(super) fn remove(&self, slot: Slot) {
        if let Some(entry) = self.entry(slot) {
            entry.state.store(0, Release);
        }
    }

    #[inline]
    fn entry(&self, slot: Slot) -> Option<&SlotEntry> {
        self.groups
            .get(slot as usize / GROUP)?
            .get()?
            .get(slot as usize % GROUP)
    }
}

fn packed(worker: WorkerId, rank: u32) -> u64 {
    u64::from(worker.0) << 32 | u64::from(rank)
}
