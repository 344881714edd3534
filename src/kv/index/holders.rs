//! Who holds a block, in a word of 32 bits: nobody, one tree, or the number of a set of trees.
//!
//! Sets are shared: blocks with the same holders have the same word, so "as before" is one comparison
//! however many trees there are, and a set is stored once for thousands of blocks. A set never
//! changes; another holder makes another set. The writer counts who refers to a set and reuses it
//! when nobody does; a set's generation tells a reader that it read one that was reused meanwhile.

use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU64, fence};

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// The word for no holder.
pub(super) const NOBODY: u32 = 0;

/// What a tree says of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    Absent,
    /// It is in the GPU, and perhaps elsewhere.
    Gpu,
    /// It is in the CPU's memory, and not in the GPU.
    Cpu,
    /// It is on disk only.
    Disk,
}

impl Mark {
    /// Trees of one mark stand together in a set.
    #[inline]
    fn plane(self) -> u64 {
        match self {
            Mark::Absent | Mark::Gpu => 0,
            Mark::Cpu => 1,
            Mark::Disk => 2,
        }
    }

    #[inline]
    fn of_plane(plane: u64) -> Self {
        match plane {
            0 => Mark::Gpu,
            1 => Mark::Cpu,
            _ => Mark::Disk,
        }
    }
}

/// A tree's number among those of its index.
pub(super) type Slot = u32;

/// Trees in one word of a set. The 16 bits above them say which: the plane, and 14 bits of group.
pub(super) const GROUP: usize = 48;
const PLANE: u32 = 14;
const GROUPS: u64 = (1 << PLANE) - 1;
const BITS: u64 = (1 << GROUP) - 1;

/// Sets of up to `3, 7, 15 ...` words.
const CLASSES: usize = 10;
const SET: u32 = 1 << 31;
const CLASS_SHIFT: u32 = 27;

/// As many trees as the largest set can hold in all planes.
pub(super) const TREES_MAX: usize = 500 * GROUP;

/// Words of a set and of its header, which is the first: the generation above 16 bits of length. The
/// generation is odd while the set is being written.
fn stride(class: usize) -> usize {
    4 << class
}

/// What readers see: the words of all sets.
#[derive(Debug)]
pub(super) struct Sets {
    /// For each class, pieces that double in size.
    pieces: [[OnceLock<Box<[AtomicU64]>>; PIECES]; CLASSES],
}

const PIECES: usize = 24;
const PIECE: u32 = 64;

/// Which piece of a class holds a set, and the set's place there.
#[inline]
fn locate(index: u32) -> (usize, usize) {
    let piece = (index / PIECE + 1).ilog2();
    (
        piece as usize,
        (index - PIECE * ((1 << piece) - 1)) as usize,
    )
}

impl Sets {
    pub(super) fn new() -> Self {
        Self {
            pieces: std::array::from_fn(|_| std::array::from_fn(|_| OnceLock::new())),
        }
    }

    #[inline]
    fn words(&self, word: u32) -> Option<&[AtomicU64]> {
        let class = ((word & !SET) >> CLASS_SHIFT) as usize;
        let (piece, at) = locate(word & ((1 << CLASS_SHIFT) - 1));
        let piece = self.pieces.get(class)?.get(piece)?.get()?;
        piece.get(at * stride(class)..(at + 1) * stride(class))
    }

    /// Tells apart what one word means at different times; always the same for a single tree's.
    #[inline]
    pub(super) fn generation(&self, word: u32) -> &AtomicU64 {
        static ONE: AtomicU64 = AtomicU64::new(0);
        static NONE: AtomicU64 = AtomicU64::new(u64::MAX);
        if word & SET == 0 {
            return &ONE;
        }
        self.words(word).map_or(&NONE, |words| &words[0])
    }

    /// Adds who is meant by a word to `members`. Returns the generation read, to compare with
    /// [`Sets::generation`] after looking at where the word came from once more: if both are as they
    /// were, that place had these holders.
    #[inline]
    pub(super) fn read(&self, word: u32, members: &mut Members) -> Option<u64> {
        if word == NOBODY {
            return Some(0);
        }
        if word & SET == 0 {
            let slot = (word - 1) >> 2;
            members.add(
                (slot as usize / GROUP) as u64,
                1 << (slot as usize % GROUP),
                u64::from((word - 1) & 3),
            );
            return Some(0);
        }
        let words = self.words(word)?;
        let generation = words[0].load(Acquire);
        if generation >> 16 & 1 == 1 {
            return None;
        }
        for word in words.get(1..=(generation & 0xffff) as usize)? {
            let word = word.load(Relaxed);
            let group = word >> GROUP;
            members.add(group & GROUPS, word & BITS, group >> PLANE);
        }
        fence(Acquire);
        Some(generation)
    }
}

/// Trees by tier, a bit each.
#[derive(Debug, Default)]
pub(super) struct Members {
    pub(super) gpu: Groups,
    /// In a lower tier only, and those of them that have it on disk only.
    pub(super) low: Groups,
    pub(super) disk: Groups,
    pub(super) has_low: bool,
    pub(super) has_disk: bool,
}

/// Room for 528 trees without an allocation.
pub(super) type Groups = SmallVec<[u64; 11]>;

impl Members {
    /// Nobody, with room for this many groups; those of later trees are left out.
    #[inline]
    pub(super) fn reset(&mut self, groups: usize) {
        self.gpu.clear();
        self.gpu.resize(groups, 0);
        if self.has_low || self.low.len() != groups {
            self.low.clear();
            self.low.resize(groups, 0);
        }
        self.has_low = false;
        if self.has_disk {
            self.disk.clear();
            self.has_disk = false;
        }
    }

    #[inline]
    fn add(&mut self, group: u64, bits: u64, plane: u64) {
        if plane != 0 {
            self.add_low(group, bits, plane);
        } else if let Some(held) = self.gpu.get_mut(group as usize) {
            *held |= bits;
        }
    }

    #[inline(never)]
    fn add_low(&mut self, group: u64, bits: u64, plane: u64) {
        self.has_low = true;
        if let Some(held) = self.low.get_mut(group as usize) {
            *held |= bits;
        }
        if Mark::of_plane(plane) == Mark::Disk {
            self.has_disk = true;
            self.disk.resize(self.low.len(), 0);
            if let Some(held) = self.disk.get_mut(group as usize) {
                *held |= bits;
            }
        }
    }

    /// Those of a group that have a block on disk only.
    #[inline]
    pub(super) fn disk(&self, group: usize) -> u64 {
        if self.has_disk { self.disk[group] } else { 0 }
    }
}

/// What only the writer knows of the sets.
#[derive(Debug)]
pub(super) struct Registry {
    free: [Vec<u32>; CLASSES],
    /// How many blocks refer to each set, by class.
    referrers: [Vec<u32>; CLASSES],
    words: FxHashMap<Box<[u64]>, u32>,
    /// The last change asked for, which a run of blocks asks again and again.
    last: Change,
    content_bytes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Change {
    from: u32,
    slot: Slot,
    mark: Mark,
    to: u32,
    was: Mark,
}

impl Registry {
    pub(super) fn new() -> Self {
        Self {
            free: Default::default(),
            referrers: Default::default(),
            words: FxHashMap::default(),
            last: Change {
                from: NOBODY,
                slot: 0,
                mark: Mark::Absent,
                to: NOBODY,
                was: Mark::Absent,
            },
            content_bytes: 0,
        }
    }

    pub(super) fn bytes(&self) -> usize {
        let sets = self.referrers.iter().enumerate();
        let own: usize = sets
            .map(|(class, sets)| sets.len() * (stride(class) * 8 + 8))
            .sum();
        own + self.content_bytes + self.words.capacity() * 28
    }

    /// The word of one tree alone.
    #[inline]
    pub(super) fn of_one(slot: Slot, mark: Mark) -> u32 {
        ((slot << 2) | mark.plane() as u32) + 1
    }

    /// What a tree says, going by a block's word.
    #[inline]
    pub(super) fn mark(&self, sets: &Sets, word: u32, slot: Slot) -> Mark {
        if self.last.from == word && self.last.slot == slot {
            return self.last.was;
        }
        if word & SET == 0 {
            return match word.wrapping_sub(1) {
                one if word == NOBODY || one >> 2 != slot => Mark::Absent,
                one => Mark::of_plane(u64::from(one & 3)),
            };
        }
        for word in self.content(sets, word) {
            let group = word >> GROUP;
            if group & GROUPS == u64::from(slot) / GROUP as u64
                && word >> (slot as usize % GROUP) & 1 == 1
            {
                return Mark::of_plane(group >> PLANE);
            }
        }
        Mark::Absent
    }

    /// The word of the same holders, but for what one tree says. To be retained before anything else
    /// is asked.
    #[inline]
    pub(super) fn with(&mut self, sets: &Sets, word: u32, slot: Slot, mark: Mark) -> u32 {
        let last = &self.last;
        if last.from == word && last.slot == slot && last.mark == mark {
            return last.to;
        }
        if word == NOBODY && mark != Mark::Absent {
            return Self::of_one(slot, mark);
        }
        let was = self.mark(sets, word, slot);
        let to = self.make(sets, word, slot, mark);
        self.last = Change {
            from: word,
            slot,
            mark,
            to,
            was,
        };
        to
    }

    #[inline]
    pub(super) fn retain(&mut self, word: u32, more: u32) {
        if word & SET != 0 {
            let (class, index) = class_of(word);
            self.referrers[class][index] += more;
        }
    }

    #[inline]
    pub(super) fn release(&mut self, sets: &Sets, word: u32, fewer: u32) {
        if word & SET != 0 {
            let (class, index) = class_of(word);
            self.referrers[class][index] -= fewer;
            if self.referrers[class][index] == 0 {
                self.forget(sets, word);
            }
        }
    }

    fn content<'a>(&self, sets: &'a Sets, word: u32) -> impl Iterator<Item = u64> + 'a {
        let words = sets.words(word).unwrap_or_default();
        let len = words.first().map_or(0, |head| head.load(Relaxed) & 0xffff);
        words
            .iter()
            .skip(1)
            .take(len as usize)
            .map(|word| word.load(Relaxed))
    }

    #[inline(never)]
    fn make(&mut self, sets: &Sets, word: u32, slot: Slot, mark: Mark) -> u32 {
        let mut content: SmallVec<[u64; 24]> = SmallVec::new();
        if word & SET != 0 {
            content.extend(self.content(sets, word));
        } else if word != NOBODY {
            let one = word - 1;
            content.push(member(one >> 2, Mark::of_plane(u64::from(one & 3))));
        }
        for plane in [Mark::Gpu, Mark::Cpu, Mark::Disk] {
            let bit = member(slot, plane);
            let found = content.binary_search_by_key(&(bit >> GROUP), |word| word >> GROUP);
            match (found, plane == mark) {
                (Ok(at), true) => content[at] |= bit,
                (Ok(at), false) => {
                    content[at] &= !(bit & BITS);
                    if content[at] & BITS == 0 {
                        content.remove(at);
                    }
                }
                (Err(at), true) => content.insert(at, bit),
                (Err(_), false) => {}
            }
        }
        match content[..] {
            [] => NOBODY,
            [one] if (one & BITS).is_power_of_two() => {
                let group = one >> GROUP;
                let slot = (group & GROUPS) * GROUP as u64 + (one & BITS).ilog2() as u64;
                Self::of_one(slot as Slot, Mark::of_plane(group >> PLANE))
            }
            _ => self.intern(sets, &content),
        }
    }

    fn intern(&mut self, sets: &Sets, content: &[u64]) -> u32 {
        if let Some(word) = self.words.get(content) {
            return *word;
        }
        let class = (0..CLASSES)
            .find(|class| content.len() < stride(*class))
            .expect("no more trees are planted than the largest set holds");
        let index = self.free[class].pop().unwrap_or_else(|| {
            self.referrers[class].push(0);
            let index = self.referrers[class].len() as u32 - 1;
            let (piece, _) = locate(index);
            sets.pieces[class][piece].get_or_init(|| {
                let words = (PIECE << piece) as usize * stride(class);
                (0..words).map(|_| AtomicU64::new(0)).collect()
            });
            index
        });
        // Blocks are fewer than an index can count, and a set has at least one of its own.
        let word = SET | (class as u32) << CLASS_SHIFT | index;
        let words = sets.words(word).expect("it was just made");
        let generation = words[0].load(Relaxed) >> 16;
        words[0].store((generation + 1) << 16, Relaxed);
        fence(Release);
        for (to, from) in words[1..].iter().zip(content) {
            to.store(*from, Relaxed);
        }
        words[0].store((generation + 2) << 16 | content.len() as u64, Release);
        self.content_bytes += size_of_val(content);
        self.words.insert(content.into(), word);
        word
    }

    #[cold]
    fn forget(&mut self, sets: &Sets, word: u32) {
        let content: SmallVec<[u64; 24]> = self.content(sets, word).collect();
        self.words.remove(&content[..]);
        self.content_bytes -= size_of_val(&content[..]);
        let (class, index) = class_of(word);
        self.free[class].push(index as u32);
        if self.last.from == word || self.last.to == word {
            self.last.from = NOBODY;
            self.last.mark = Mark::Absent;
            self.last.to = NOBODY;
            self.last.was = Mark::Absent;
        }
    }
}

fn class_of(word: u32) -> (usize, usize) {
    let class = (word & !SET) >> CLASS_SHIFT;
    (class as usize, (word & ((1 << CLASS_SHIFT) - 1)) as usize)
}

/// One tree as a word of a set.
fn member(slot: Slot, mark: Mark) -> u64 {
    let group = u64::from(slot) / GROUP as u64;
    (group | mark.plane() << PLANE) << GROUP | 1 << (slot as usize % GROUP)
}
