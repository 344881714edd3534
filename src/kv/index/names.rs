//! From an engine's name of a block to the block: one table for all workers of an index, since most
//! engines give the same content the same name. Only the writer reads it.
//!
//! Eight entries (32 bits of the hash, the block's number) fill a cache line. Which block really has
//! the name, the caller asks the block. The table is a directory of segments; a full segment is split
//! in two by its next bit of the hash, which the entries keep, so growing reads no names, copies
//! nothing twice, takes no memory but the new half, and no event waits for the whole to be built anew.

use smallvec::SmallVec;

use super::pages::BlockId;
use super::simd::places_of;
use super::simd::prefetch;

const ENTRIES: usize = 8;
/// Lines of a segment: 8 KiB.
const LINES: usize = 128;
/// Three quarters.
const SEGMENT_MAX: u32 = (LINES * ENTRIES * 3 / 4) as u32;
/// Past so many halvings a segment is not split, so that names whose hashes are alike by intent take
/// neither memory nor time without a bound. Four times what the largest index needs.
const DEPTH_MAX: u32 = 20;

/// A block's number has 27 bits. The five above each of a line's eight count what went past that line:
/// one count for each value of three bits of the hash, so that a look seldom goes on for nothing. (In
/// a table that entries come to and leave, every fourth line has something that went past.)
const BLOCK: u32 = (1 << OVER_SHIFT) - 1;
const OVER_SHIFT: u32 = 27;
/// A count that was once so high is not counted down any more.
const OVER_MAX: u32 = 31;

#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Line {
    /// 0 for a free place.
    hashes: [u32; ENTRIES],
    blocks: [u32; ENTRIES],
}

const EMPTY: Line = Line {
    hashes: [0; ENTRIES],
    blocks: [0; ENTRIES],
};

impl Line {
    /// The places with this hash, a bit each.
    #[inline]
    fn like(&self, hash: u32) -> u32 {
        places_of(hash, &self.hashes)
    }

    #[inline]
    fn find(&self, hash: u32, mut is_it: impl FnMut(BlockId) -> bool) -> Option<usize> {
        let mut like = self.like(hash);
        while like != 0 {
            let at = like.trailing_zeros() as usize % ENTRIES;
            if is_it(self.block(at)) {
                return Some(at);
            }
            like &= like - 1;
        }
        None
    }

    #[inline]
    fn block(&self, at: usize) -> BlockId {
        self.blocks[at] & BLOCK
    }

    #[inline]
    fn set(&mut self, at: usize, hash: u32, block: BlockId) {
        self.hashes[at] = hash;
        self.blocks[at] = self.blocks[at] & !BLOCK | block;
    }

    #[inline]
    fn over(&self, hash: u32) -> u32 {
        self.blocks[kind(hash)] >> OVER_SHIFT
    }

    fn set_over(&mut self, hash: u32, over: u32) {
        let block = &mut self.blocks[kind(hash)];
        *block = *block & BLOCK | over << OVER_SHIFT;
    }
}

/// Lines by twos share 128 bytes, which processors like to load together.
#[derive(Debug)]
#[repr(align(128))]
struct Lines([Line; LINES]);

#[derive(Debug)]
struct Segment {
    lines: Box<Lines>,
    len: u32,
    /// How many of the hash's first bits all its entries share.
    depth: u32,
}

#[derive(Debug)]
pub(super) struct Names {
    /// The segment of each value of the first `depth` bits of a hash.
    directory: Vec<u32>,
    depth: u32,
    segments: Vec<Segment>,
    depth_max: u32,
}

/// What became of a name that a block was to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Naming {
    Done,
    /// Another block has it.
    Taken(BlockId),
    /// There are too many whose hashes are alike.
    NoRoom,
}

/// A name, spread over all bits.
#[inline]
fn spread(name: u64) -> u32 {
    let product = u128::from(name ^ 0xa076_1d64_78bd_642f) * 0xe703_7ed1_a0b4_28db;
    let hash = (product as u64) ^ ((product >> 64) as u64);
    ((hash >> 32) as u32).max(1)
}

#[inline]
fn home(hash: u32) -> usize {
    hash as usize % LINES
}

/// Which of a line's counts of what went past it is for a hash.
#[inline]
fn kind(hash: u32) -> usize {
    hash as usize / LINES % ENTRIES
}

/// The lines that an entry may be in, best first.
#[inline]
fn way(hash: u32) -> impl Iterator<Item = usize> {
    let home = home(hash);
    (0..LINES).map(move |step| home ^ step)
}

impl Names {
    pub(super) fn new() -> Self {
        Self::with_depth_max(DEPTH_MAX)
    }

    fn with_depth_max(depth_max: u32) -> Self {
        Self {
            directory: vec![0],
            depth: 0,
            segments: vec![Segment::new(0)],
            depth_max,
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.segments.len() * size_of::<Lines>()
            + self.segments.capacity() * size_of::<Segment>()
            + self.directory.capacity() * 4
    }

    #[inline]
    fn segment_of(&self, hash: u32) -> usize {
        let first = (u64::from(hash) << self.depth) >> 32;
        self.directory[first as usize] as usize
    }

    /// Asks for the line of a name ahead of its use.
    #[inline]
    pub(super) fn prefetch(&self, name: u64) {
        let hash = spread(name);
        prefetch(&self.segments[self.segment_of(hash)].lines.0[home(hash)]);
    }

    #[inline]
    pub(super) fn find(&self, name: u64, is_it: impl FnMut(BlockId) -> bool) -> Option<BlockId> {
        let hash = spread(name);
        let segment = &self.segments[self.segment_of(hash)];
        let (line, at) = segment.find(hash, is_it)?;
        Some(segment.lines.0[line].block(at))
    }

    /// Gives a name to a block, if it is plain from the table alone that no block has it.
    #[inline]
    pub(super) fn insert_plainly(&mut self, name: u64, block: BlockId) -> bool {
        let hash = spread(name);
        let index = self.segment_of(hash);
        let segment = &mut self.segments[index];
        if segment.len >= SEGMENT_MAX {
            return false;
        }
        for line in way(hash) {
            let line = &segment.lines.0[line];
            if line.like(hash) != 0 {
                return false;
            }
            if line.over(hash) == 0 {
                break;
            }
        }
        segment.insert(hash, block);
        true
    }

    /// Gives a name to a block, unless another has it already.
    #[inline]
    pub(super) fn insert(
        &mut self,
        name: u64,
        block: BlockId,
        is_it: impl FnMut(BlockId) -> bool,
    ) -> Naming {
        let hash = spread(name);
        let mut index = self.segment_of(hash);
        let segment = &self.segments[index];
        if let Some((line, at)) = segment.find(hash, is_it) {
            return Naming::Taken(segment.lines.0[line].block(at));
        }
        if segment.len >= SEGMENT_MAX {
            match self.split(hash) {
                Some(split) => index = split,
                None => return Naming::NoRoom,
            }
        }
        self.segments[index].insert(hash, block);
        Naming::Done
    }

    #[inline]
    pub(super) fn remove(&mut self, name: u64, block: BlockId) {
        let hash = spread(name);
        let index = self.segment_of(hash);
        self.segments[index].remove(hash, block);
    }

    /// Halves the segment of a hash until there is room for it. Returns the segment then.
    #[cold]
    #[inline(never)]
    fn split(&mut self, hash: u32) -> Option<usize> {
        loop {
            let index = self.segment_of(hash);
            let depth = self.segments[index].depth;
            if self.segments[index].len < SEGMENT_MAX {
                return Some(index);
            }
            if depth == self.depth_max {
                return None;
            }
            if depth == self.depth {
                let twice = self.directory.iter().flat_map(|segment| [*segment; 2]);
                self.directory = twice.collect();
                self.depth += 1;
            }
            let new = self.segments[index].split();
            // Those that share the bits so far, and the next one is set.
            let first = ((u64::from(hash) << depth) >> 32 << 1 | 1) as usize;
            let each = 1 << (self.depth - depth - 1);
            let new_index = self.segments.len() as u32;
            self.directory[first * each..(first + 1) * each].fill(new_index);
            self.segments.push(new);
        }
    }
}

impl Segment {
    fn new(depth: u32) -> Self {
        Self {
            lines: Box::new(Lines([EMPTY; LINES])),
            len: 0,
            depth,
        }
    }

    #[inline]
    fn find(&self, hash: u32, mut is_it: impl FnMut(BlockId) -> bool) -> Option<(usize, usize)> {
        for line in way(hash) {
            if let Some(at) = self.lines.0[line].find(hash, &mut is_it) {
                return Some((line, at));
            }
            if self.lines.0[line].over(hash) == 0 {
                break;
            }
        }
        None
    }

    /// There must be room.
    #[inline]
    fn insert(&mut self, hash: u32, block: BlockId) {
        self.len += 1;
        for line in way(hash) {
            let line = &mut self.lines.0[line];
            let free = line.like(0);
            if free != 0 {
                line.set(free.trailing_zeros() as usize % ENTRIES, hash, block);
                return;
            }
            line.set_over(hash, (line.over(hash) + 1).min(OVER_MAX));
        }
    }

    #[inline]
    fn remove(&mut self, hash: u32, block: BlockId) {
        let Some((found, at)) = self.find(hash, |found| found == block) else {
            return;
        };
        self.lines.0[found].set(at, 0, 0);
        self.len -= 1;
        for line in way(hash).take_while(|line| *line != found) {
            let line = &mut self.lines.0[line];
            let over = line.over(hash);
            if over < OVER_MAX {
                line.set_over(hash, over - 1);
            }
        }
    }

    /// Keeps those whose next bit is not set, and returns the others. Those that had gone past their
    /// first line are brought nearer.
    fn split(&mut self) -> Self {
        let depth = self.depth;
        self.depth += 1;
        let mut other = Self::new(self.depth);
        let mut away: SmallVec<[(u32, BlockId); 128]> = SmallVec::new();
        let lines = self.lines.0.iter_mut().zip(&mut other.lines.0);
        for (line, (from, to)) in lines.enumerate() {
            // Eight at once, without a branch.
            let homes = from.hashes.map(|hash| hash & (LINES as u32 - 1));
            let mut gone = !(places_of(line as u32, &homes) | from.like(0)) & 0xff;
            while gone != 0 {
                let at = gone.trailing_zeros() as usize % ENTRIES;
                away.push((from.hashes[at], from.block(at)));
                from.set(at, 0, 0);
                gone &= gone - 1;
            }
            let go = from.hashes.map(|hash| (hash << depth).cast_signed() >> 31);
            let go = go.map(i32::cast_unsigned);
            let (hashes, blocks) = (from.hashes, from.blocks.map(|block| block & BLOCK));
            to.hashes = std::array::from_fn(|at| hashes[at] & go[at]);
            to.blocks = std::array::from_fn(|at| blocks[at] & go[at]);
            from.hashes = std::array::from_fn(|at| hashes[at] & !go[at]);
            from.blocks = std::array::from_fn(|at| blocks[at] & !go[at]);
            other.len += places_of(0, &to.hashes).count_zeros() - (32 - ENTRIES as u32);
        }
        self.len -= other.len + away.len() as u32;
        for (hash, block) in away {
            match hash << depth >> 31 {
                0 => self.insert(hash, block),
                _ => other.insert(hash, block),
            }
        }
        other
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn check(depth_max: u32, names: u64, steps: Vec<(u64, bool)>) {
        let mut table = Names::with_depth_max(depth_max);
        let mut model: HashMap<u64, BlockId> = HashMap::new();
        for (name, put) in steps {
            let name = name % names;
            let block = name as u32;
            if put {
                let expected = model.get(&name).copied();
                match table.insert(name, block, |it| u64::from(it) == name) {
                    Naming::Taken(it) => assert_eq!(Some(it), expected),
                    Naming::Done => assert_eq!(model.insert(name, block), None),
                    Naming::NoRoom => {
                        assert!(model.len() >= SEGMENT_MAX as usize && expected.is_none())
                    }
                }
            } else if model.remove(&name).is_some() {
                table.remove(name, block);
            }
        }
        for name in 0..names {
            let found = table.find(name, |it| u64::from(it) == name);
            assert_eq!(found, model.get(&name).copied());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20))]

        #[test]
        fn it_holds_what_was_put_in_and_not_taken_out(
            steps in proptest::collection::vec((any::<u64>(), proptest::bool::weighted(0.8)), 1..20_000),
            names in prop_oneof![Just(100u64), Just(20_000)],
            depth_max in prop_oneof![Just(0), Just(2), Just(DEPTH_MAX)],
        ) {
            check(depth_max, names, steps);
        }
    }

    #[test]
    fn names_whose_hashes_are_alike_find_no_room_at_last() {
        let mut table = Names::with_depth_max(2);
        let done = (0..10_000).filter(|name| {
            table.insert(*name, *name as u32, |it| u64::from(it) == *name) == Naming::Done
        });
        assert_eq!(done.count(), 4 * SEGMENT_MAX as usize);
        assert_eq!(table.segments.len(), 4);
    }

    #[test]
    fn a_line_that_much_went_past_lets_it_be_found_and_removed() {
        let mut segment = Segment::new(0);
        for block in 0..100 {
            segment.insert(7, block);
        }
        for block in (0..100).rev() {
            assert!(segment.find(7, |it| it == block).is_some());
            segment.remove(7, block);
            assert!(segment.find(7, |it| it == block).is_none());
        }
        assert_eq!(segment.len, 0);
    }
}
