//! A part of the table of names, whose entries share the first bits of their hashes: lines of eight
//! entries, each as near to the line of its hash as there was room.

use smallvec::SmallVec;

use crate::kv::index::pages::BlockId;
use crate::kv::index::simd::places_of;

const ENTRIES: usize = 8;
/// Lines of a segment: 8 KiB.
const LINES: usize = 128;
/// Three quarters.
pub(super) const SEGMENT_MAX: u32 = (LINES * ENTRIES * 3 / 4) as u32;
/// A block's number has 27 bits. The five above each of a line's eight count what went past that line:
/// one count for each value of three bits of the hash, so that a look seldom goes on for nothing. (In
/// a table that entries come to and leave, every fourth line has something that went past.)
const BLOCK: u32 = (1 << OVER_SHIFT) - 1;
const OVER_SHIFT: u32 = 27;
/// A count that was once so high is not counted down any more.
const OVER_MAX: u32 = 31;

#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Line {
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

/// What a segment takes beside itself.
pub(super) const LINES_BYTES: usize = size_of::<Lines>();

#[derive(Debug)]
pub(super) struct Segment {
    lines: Box<Lines>,
    len: u32,
    /// How many of the hash's first bits all its entries share.
    depth: u32,
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

impl Segment {
    pub(super) fn new(depth: u32) -> Self {
        Self {
            lines: Box::new(Lines([EMPTY; LINES])),
            len: 0,
            depth,
        }
    }

    #[inline]
    pub(super) fn depth(&self) -> u32 {
        self.depth
    }

    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.len >= SEGMENT_MAX
    }

    /// The line where to look first.
    #[inline]
    pub(super) fn home(&self, hash: u32) -> &Line {
        &self.lines.0[home(hash)]
    }

    #[inline]
    pub(super) fn find(&self, hash: u32, is_it: impl FnMut(BlockId) -> bool) -> Option<BlockId> {
        let (line, at) = self.place_of(hash, is_it)?;
        Some(self.lines.0[line].block(at))
    }

    /// Whether any block's name has this hash.
    #[inline]
    pub(super) fn has_like(&self, hash: u32) -> bool {
        for line in way(hash) {
            let line = &self.lines.0[line];
            if line.like(hash) != 0 {
                return true;
            }
            if line.over(hash) == 0 {
                break;
            }
        }
        false
    }

    #[inline]
    fn place_of(
        &self,
        hash: u32,
        mut is_it: impl FnMut(BlockId) -> bool,
    ) -> Option<(usize, usize)> {
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
    pub(super) fn insert(&mut self, hash: u32, block: BlockId) {
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
    pub(super) fn remove(&mut self, hash: u32, block: BlockId) {
        let Some((found, at)) = self.place_of(hash, |found| found == block) else {
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
    pub(super) fn split(&mut self) -> Self {
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
    use super::*;

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
