//! Which tree a number stands for. Numbers are reused: a tree's bits are cleared everywhere before its
//! number is free, and a reader leaves out a tree that was planted after it began to read, so bits of
//! the tree before are never taken for those of the next.

use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU64, AtomicUsize, fence};

use super::holders::{GROUP, Slot, TREES_MAX};
use super::pause::pause;
use crate::ids::WorkerId;

/// Places are made a group at once, so that those of one word of a set lie together.
const PIECE: usize = GROUP;

#[derive(Debug, Default)]
struct Place {
    /// The number of its planting, doubled, and whether it scores; 0 while nobody is there.
    planted: AtomicU64,
    /// Worker above rank.
    who: AtomicU64,
}

#[derive(Debug)]
pub(super) struct Roster {
    pieces: Box<[OnceLock<Box<[Place; PIECE]>>]>,
    /// Plantings so far.
    plantings: AtomicU64,
    /// Places that were ever taken.
    end: AtomicUsize,
}

/// What a reader begins with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Roll {
    plantings: u64,
    /// Groups of trees in a set.
    pub(super) groups: usize,
}

impl Roster {
    pub(super) fn new() -> Self {
        Self {
            pieces: (0..TREES_MAX.div_ceil(PIECE))
                .map(|_| OnceLock::new())
                .collect(),
            plantings: AtomicU64::new(0),
            end: AtomicUsize::new(0),
        }
    }

    #[inline]
    pub(super) fn call(&self) -> Roll {
        let plantings = self.plantings.load(Acquire);
        Roll {
            plantings,
            groups: self.end.load(Relaxed).div_ceil(GROUP),
        }
    }

    /// The workers and ranks of some numbers of a group, a bit each, that were read since the roll was
    /// called; without those where no tree that scores is there, or one that was planted later.
    #[inline]
    pub(super) fn who(
        &self,
        roll: Roll,
        group: usize,
        mut bits: u64,
        mut tell: impl FnMut(Slot, WorkerId, u32),
    ) {
        let Some(places) = self.pieces.get(group).and_then(OnceLock::get) else {
            return;
        };
        while bits != 0 {
            let at = bits.trailing_zeros() as usize;
            bits &= bits - 1;
            let Some(place) = places.get(at) else {
                return;
            };
            let planted = place.planted.load(Acquire);
            pause();
            let who = place.who.load(Relaxed);
            fence(Acquire);
            let is_same = place.planted.load(Relaxed) == planted;
            let is_scoring = planted & 1 == 1;
            let was_there = planted >> 1 <= roll.plantings;
            if is_same && is_scoring && was_there {
                let slot = (group * GROUP + at) as Slot;
                tell(slot, WorkerId((who >> 32) as u32), who as u32);
            }
        }
    }

    /// Only by the writer, as all below.
    pub(super) fn plant(&self, slot: Slot, worker: WorkerId, rank: u32) {
        self.pieces[slot as usize / PIECE]
            .get_or_init(|| Box::new(std::array::from_fn(|_| Place::default())));
        let place = self.place(slot).expect("it was just made");
        let number = self.plantings.load(Relaxed) + 1;
        place.planted.store(0, Relaxed);
        fence(Release);
        place
            .who
            .store(u64::from(worker.0) << 32 | u64::from(rank), Relaxed);
        place.planted.store(number << 1, Release);
        let end = self.end.load(Relaxed).max(slot as usize + 1);
        self.end.store(end, Relaxed);
        // Who sees this number sees the bits of the place's last tree cleared, which was before.
        self.plantings.store(number, Release);
    }

    /// Where the tree of one rank is.
    pub(super) fn slot_of(&self, worker: WorkerId, rank: u32) -> Option<Slot> {
        let who = u64::from(worker.0) << 32 | u64::from(rank);
        (0..self.end.load(Relaxed) as Slot).find(|slot| {
            self.place(*slot).is_some_and(|place| {
                place.planted.load(Relaxed) != 0 && place.who.load(Relaxed) == who
            })
        })
    }

    pub(super) fn set_scoring(&self, slot: Slot, is_scoring: bool) {
        if let Some(place) = self.place(slot) {
            let planted = place.planted.load(Relaxed);
            place
                .planted
                .store(planted & !1 | u64::from(is_scoring), Release);
        }
    }

    pub(super) fn fell(&self, slot: Slot) {
        if let Some(place) = self.place(slot) {
            place.planted.store(0, Release);
        }
    }

    #[inline]
    fn place(&self, slot: Slot) -> Option<&Place> {
        self.pieces
            .get(slot as usize / PIECE)?
            .get()?
            .get(slot as usize % PIECE)
    }
}
