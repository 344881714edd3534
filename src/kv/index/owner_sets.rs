//! The owners of a block as one number of 32 bits, a [`SetId`]: no tree, a single tree, or a stored
//! set of trees. This file has the encoding and what lookups read; [`super::interner`] makes sets.
//!
//! Sets are shared: blocks with the same owners have the same id, so "same owners as the block
//! before" is one comparison however many trees there are, and a set is stored once for thousands of
//! blocks. A set never changes; one more owner gives another set. The writer counts the blocks that
//! refer to a set and reuses its memory at zero. A set's generation shows a reader that the memory
//! was reused while it read.

use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use super::members::{DISK_PLANE, Members};
use super::sync::{AtomicU64, SETS_AT_ONCE, fence};

/// The owners of a block. [`EMPTY_SET`]; one plus a slot and a tier ([`sole_owner`]); or, with
/// [`STORED`] set, a size class and an index in it.
pub(super) type SetId = u32;

pub(super) const EMPTY_SET: SetId = 0;

/// A tree's number in its index.
pub(super) type Slot = u32;

/// No tree: the index was full.
pub(super) const NO_SLOT: Slot = u32::MAX;

/// Where a tree has a block: the fastest tier with a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Residency {
    Absent,
    /// In the GPU, and perhaps elsewhere.
    Gpu,
    /// In the CPU's memory, not in the GPU.
    Cpu,
    /// On disk only.
    Disk,
}

impl Residency {
    /// Two bits that stand for the tier in a set.
    #[inline]
    pub(super) fn plane(self) -> u64 {
        match self {
            Residency::Absent | Residency::Gpu => 0,
            Residency::Cpu => 1,
            Residency::Disk => DISK_PLANE,
        }
    }

    #[inline]
    pub(super) fn of_plane(plane: u64) -> Self {
        match plane {
            0 => Residency::Gpu,
            1 => Residency::Cpu,
            _ => Residency::Disk,
        }
    }
}

/// A stored set is a sorted list of words. Each word has the trees of one group (slots that follow
/// each other) in one tier: 48 bits for the trees, above them 14 bits of group and 2 of tier.
pub(super) const TREES_PER_WORD: usize = 48;
const PLANE_SHIFT: u32 = 14;
const GROUP_MASK: u64 = (1 << PLANE_SHIFT) - 1;
pub(super) const TREE_MASK: u64 = (1 << TREES_PER_WORD) - 1;

/// Set sizes of up to 3, 7, 15 ... words.
pub(super) const CLASSES: usize = 10;
pub(super) const STORED: SetId = 1 << 31;
const CLASS_SHIFT: u32 = 27;
const INDEX_MASK: u32 = (1 << CLASS_SHIFT) - 1;

/// As many trees as the largest set has room for in all tiers.
pub(super) const MAX_TREES: usize = 500 * TREES_PER_WORD;

/// Words of a set of this class with its header, the first word: the generation above 16 bits of
/// length. The generation is odd while the set is being written.
pub(super) fn stride(class: usize) -> usize {
    4 << class
}

/// The set of one tree alone.
#[inline]
pub(super) fn sole_owner(slot: Slot, residency: Residency) -> SetId {
    ((slot << 2) | residency.plane() as u32) + 1
}

/// The tree that a set of [`sole_owner`] stands for.
#[inline]
pub(super) fn owner_of(sole: SetId) -> (Slot, u64) {
    ((sole - 1) >> 2, u64::from((sole - 1) & 3))
}

#[inline]
pub(super) fn is_stored(set: SetId) -> bool {
    set & STORED != 0
}

pub(super) fn stored_id(class: usize, index: u32) -> SetId {
    STORED | (class as u32) << CLASS_SHIFT | index
}

/// The size class of a stored set, and its index there.
#[inline]
pub(super) fn class_of(set: SetId) -> (usize, u32) {
    let class = (set & !STORED) >> CLASS_SHIFT;
    (class as usize, set & INDEX_MASK)
}

/// One tree as a word of a set.
pub(super) fn word_of(slot: Slot, residency: Residency) -> u64 {
    let group = u64::from(slot) / TREES_PER_WORD as u64;
    (group | residency.plane() << PLANE_SHIFT) << TREES_PER_WORD
        | 1 << (slot as usize % TREES_PER_WORD)
}

/// Group and tier of a word.
#[inline]
pub(super) fn group_and_plane(word: u64) -> (u64, u64) {
    let both = word >> TREES_PER_WORD;
    (both & GROUP_MASK, both >> PLANE_SHIFT)
}

/// Pieces of a class double in size, the first one has so many sets.
const PIECES: usize = 24;
pub(super) const FIRST_PIECE: u32 = SETS_AT_ONCE;

/// The piece of a class that has a set, and the set's position in it.
#[inline]
pub(super) fn locate(index: u32) -> (usize, usize) {
    let piece = (index / FIRST_PIECE + 1).ilog2();
    let position = index - FIRST_PIECE * ((1 << piece) - 1);
    (piece as usize, position as usize)
}

type Piece = OnceLock<Box<[AtomicU64]>>;

/// The words of all stored sets.
#[derive(Debug)]
pub(super) struct OwnerSets {
    pub(super) classes: [[Piece; PIECES]; CLASSES],
    /// What stands in for the generation of a single tree's id, and of an id without a set.
    sole_owner: AtomicU64,
    no_such_set: AtomicU64,
}

impl OwnerSets {
    pub(super) fn new() -> Self {
        Self {
            classes: std::array::from_fn(|_| std::array::from_fn(|_| OnceLock::new())),
            sole_owner: AtomicU64::new(0),
            no_such_set: AtomicU64::new(u64::MAX),
        }
    }

    /// A stored set's header and all words it has room for.
    #[inline]
    pub(super) fn words(&self, set: SetId) -> Option<&[AtomicU64]> {
        let (class, index) = class_of(set);
        let (piece, position) = locate(index);
        let piece = self.classes.get(class)?.get(piece)?.get()?;
        piece.get(position * stride(class)..(position + 1) * stride(class))
    }

    /// Changes whenever the id comes to stand for another set; constant for a single tree's.
    #[inline]
    pub(super) fn generation(&self, set: SetId) -> &AtomicU64 {
        if !is_stored(set) {
            return &self.sole_owner;
        }
        self.words(set).map_or(&self.no_such_set, |words| &words[0])
    }

    /// Adds the set's trees to `members`. Returns the generation that was read. The caller then checks
    /// that the block still has this id and the id still has this generation
    /// ([`OwnerSets::generation`]); if so, the block had these owners.
    #[inline]
    pub(super) fn read(&self, set: SetId, members: &mut Members) -> Option<u64> {
        if set == EMPTY_SET {
            return Some(0);
        }
        if !is_stored(set) {
            let (slot, plane) = owner_of(set);
            members.add(
                (slot as usize / TREES_PER_WORD) as u64,
                1 << (slot as usize % TREES_PER_WORD),
                plane,
            );
            return Some(0);
        }
        let words = self.words(set)?;
        let generation = words[0].load(Acquire);
        if generation >> 16 & 1 == 1 {
            return None;
        }
        for word in words.get(1..=(generation & 0xffff) as usize)? {
            let word = word.load(Relaxed);
            let (group, plane) = group_and_plane(word);
            members.add(group, word & TREE_MASK, plane);
        }
        fence(Acquire);
        Some(generation)
    }
}
