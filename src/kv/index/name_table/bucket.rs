//! A bucket of the name table: entries that share the first bits of their hashes, in cache lines of
//! eight entries. Each entry is as near to its hash's home line as there was room.

use smallvec::SmallVec;

use crate::kv::index::pages::BlockId;
use crate::kv::index::simd::{matching_lanes, prefetch};

const ENTRIES: usize = 8;
/// Lines of a bucket: 8 KiB.
const LINES: usize = 128;
/// A bucket is full at three quarters.
pub(super) const MAX_ENTRIES: u16 = (LINES * ENTRIES * 3 / 4) as u16;
/// A block's number has 27 bits. The five bits above each of a line's eight block numbers count entries
/// that overflowed past the line: one count for each value of three bits of the hash, so that a lookup
/// seldom goes on in vain. (In a table with insertions and removals, every fourth line has overflowed.)
const BLOCK: u32 = (1 << OVERFLOW_SHIFT) - 1;
const OVERFLOW_SHIFT: u32 = 27;
/// A count that reached this stays, as the true number is not known any more.
const MAX_OVERFLOW: u32 = 31;

#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Line {
    /// 0 for a free entry.
    hashes: [u32; ENTRIES],
    blocks: [u32; ENTRIES],
}

const EMPTY: Line = Line {
    hashes: [0; ENTRIES],
    blocks: [0; ENTRIES],
};

impl Line {
    /// The lanes with this hash, a bit each.
    #[inline]
    fn matching(&self, hash: u32) -> u32 {
        matching_lanes(hash, &self.hashes)
    }

    #[inline]
    fn find(&self, hash: u32, mut matches: impl FnMut(BlockId) -> bool) -> Option<usize> {
        let mut matching = self.matching(hash);
        while matching != 0 {
            let lane = matching.trailing_zeros() as usize % ENTRIES;
            if matches(self.block(lane)) {
                return Some(lane);
            }
            matching &= matching - 1;
        }
        None
    }

    #[inline]
    fn block(&self, lane: usize) -> BlockId {
        self.blocks[lane] & BLOCK
    }

    #[inline]
    fn set(&mut self, lane: usize, hash: u32, block: BlockId) {
        self.hashes[lane] = hash;
        self.blocks[lane] = self.blocks[lane] & !BLOCK | block;
    }

    #[inline]
    fn overflow(&self, hash: u32) -> u32 {
        self.blocks[kind(hash)] >> OVERFLOW_SHIFT
    }

    fn set_overflow(&mut self, hash: u32, overflow: u32) {
        let block = &mut self.blocks[kind(hash)];
        *block = *block & BLOCK | overflow << OVERFLOW_SHIFT;
    }
}

/// Aligned to 128 bytes, since processors load pairs of cache lines together.
#[derive(Debug)]
#[repr(align(128))]
struct Lines([Line; LINES]);

/// Memory of a bucket beside [`Bucket`] itself.
pub(super) const LINES_BYTES: usize = size_of::<Lines>();

#[derive(Debug)]
pub(super) struct Bucket {
    lines: Box<Lines>,
    /// The first bits of their hashes that all entries share, and how many these are.
    prefix: u32,
    depth: u8,
    len: u16,
}

#[inline]
fn home(hash: u32) -> usize {
    hash as usize % LINES
}

/// Which of a line's overflow counts is for a hash.
#[inline]
fn kind(hash: u32) -> usize {
    hash as usize / LINES % ENTRIES
}

/// The lines that an entry may be in, home line first.
#[inline]
fn probe_order(hash: u32) -> impl Iterator<Item = usize> {
    let home = home(hash);
    (0..LINES).map(move |step| home ^ step)
}

impl Bucket {
    pub(super) fn new(prefix: u32, depth: u32) -> Self {
        Self {
            lines: Box::new(Lines([EMPTY; LINES])),
            prefix,
            depth: depth as u8,
            len: 0,
        }
    }

    #[cfg(test)]
    pub(super) fn recount(&self) -> usize {
        let entries = self.lines.0.iter().flat_map(|line| line.hashes);
        assert_eq!(
            entries.filter(|hash| *hash != 0).count(),
            usize::from(self.len)
        );
        size_of_val(self) + size_of_val(&*self.lines)
    }

    #[inline]
    pub(super) fn depth(&self) -> u32 {
        u32::from(self.depth)
    }

    #[inline]
    pub(super) fn prefix(&self) -> u32 {
        self.prefix
    }

    /// Less than a quarter of what it has room for.
    #[inline]
    pub(super) fn is_sparse(&self) -> bool {
        self.len < MAX_ENTRIES / 4
    }

    /// Whether this bucket would be at most half full with another one's entries.
    pub(super) fn fits(&self, other: &Self) -> bool {
        self.len + other.len <= MAX_ENTRIES / 2
    }

    /// Adds the entries of the bucket that differs in the last shared bit.
    pub(super) fn merge(&mut self, other: &Self) {
        self.depth -= 1;
        self.prefix >>= 1;
        for line in &other.lines.0 {
            for (lane, hash) in line.hashes.into_iter().enumerate() {
                if hash != 0 {
                    self.insert(hash, line.block(lane));
                }
            }
        }
    }

    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.len >= MAX_ENTRIES
    }

    /// Asks for the line that a lookup starts with.
    #[inline]
    pub(super) fn prefetch(&self, hash: u32) {
        prefetch(&self.lines.0[home(hash)]);
    }

    /// Asks for the lines that an insertion reads.
    #[inline]
    pub(super) fn prefetch_for_insert(&self, hash: u32) {
        self.prefetch(hash);
        // Of a bucket that is this full, every sixth home line has no room.
        if self.len > MAX_ENTRIES / 3 * 2 {
            prefetch(&self.lines.0[home(hash) ^ 1]);
        }
    }

    #[inline]
    pub(super) fn find(&self, hash: u32, matches: impl FnMut(BlockId) -> bool) -> Option<BlockId> {
        let (line, lane) = self.locate(hash, matches)?;
        Some(self.lines.0[line].block(lane))
    }

    /// Adds an entry unless another has its hash. Returns whether it did. Only if the bucket is not full.
    #[inline]
    pub(super) fn insert_if_new(&mut self, hash: u32, block: BlockId) -> bool {
        let line = &mut self.lines.0[home(hash)];
        let free = line.matching(0);
        // Nearly always, the home line has room, and nothing with this hash is anywhere else.
        if free == 0 || line.overflow(hash) > 0 {
            return self.insert_further_if_new(hash, block);
        }
        if line.matching(hash) != 0 {
            return false;
        }
        line.set(free.trailing_zeros() as usize % ENTRIES, hash, block);
        self.len += 1;
        true
    }

    /// As [`Bucket::insert_if_new`], where the home line alone does not decide.
    #[inline(never)]
    fn insert_further_if_new(&mut self, hash: u32, block: BlockId) -> bool {
        let is_new = self.locate(hash, |_| true).is_none();
        if is_new {
            self.insert(hash, block);
        }
        is_new
    }

    #[inline]
    fn locate(
        &self,
        hash: u32,
        mut matches: impl FnMut(BlockId) -> bool,
    ) -> Option<(usize, usize)> {
        for line in probe_order(hash) {
            if let Some(lane) = self.lines.0[line].find(hash, &mut matches) {
                return Some((line, lane));
            }
            if self.lines.0[line].overflow(hash) == 0 {
                break;
            }
        }
        None
    }

    /// Only if the bucket is not full.
    #[inline]
    pub(super) fn insert(&mut self, hash: u32, block: BlockId) {
        self.len += 1;
        for line in probe_order(hash) {
            let line = &mut self.lines.0[line];
            let free = line.matching(0);
            if free != 0 {
                line.set(free.trailing_zeros() as usize % ENTRIES, hash, block);
                return;
            }
            line.set_overflow(hash, (line.overflow(hash) + 1).min(MAX_OVERFLOW));
        }
    }

    #[inline]
    pub(super) fn remove(&mut self, hash: u32, block: BlockId) {
        let Some((found, lane)) = self.locate(hash, |found| found == block) else {
            return;
        };
        self.lines.0[found].set(lane, 0, 0);
        self.len -= 1;
        for line in probe_order(hash).take_while(|line| *line != found) {
            let line = &mut self.lines.0[line];
            let overflow = line.overflow(hash);
            if overflow < MAX_OVERFLOW {
                line.set_overflow(hash, overflow - 1);
            }
        }
    }

    /// Moves the entries whose next bit is set to a new bucket. Entries outside their home line are
    /// inserted again, nearer to it.
    pub(super) fn split(&mut self) -> Self {
        let depth = self.depth();
        self.depth += 1;
        self.prefix <<= 1;
        let mut other = Self::new(self.prefix | 1, self.depth());
        let mut displaced: SmallVec<[(u32, BlockId); 128]> = SmallVec::new();
        let lines = self.lines.0.iter_mut().zip(&mut other.lines.0);
        for (line, (from, to)) in lines.enumerate() {
            // All eight lanes at once, without a branch.
            let homes = from.hashes.map(|hash| hash & (LINES as u32 - 1));
            let mut is_displaced = !(matching_lanes(line as u32, &homes) | from.matching(0)) & 0xff;
            while is_displaced != 0 {
                let lane = is_displaced.trailing_zeros() as usize % ENTRIES;
                displaced.push((from.hashes[lane], from.block(lane)));
                from.set(lane, 0, 0);
                is_displaced &= is_displaced - 1;
            }
            let moves = from.hashes.map(|hash| (hash << depth).cast_signed() >> 31);
            let moves = moves.map(i32::cast_unsigned);
            let (hashes, blocks) = (from.hashes, from.blocks.map(|block| block & BLOCK));
            to.hashes = std::array::from_fn(|lane| hashes[lane] & moves[lane]);
            to.blocks = std::array::from_fn(|lane| blocks[lane] & moves[lane]);
            from.hashes = std::array::from_fn(|lane| hashes[lane] & !moves[lane]);
            from.blocks = std::array::from_fn(|lane| blocks[lane] & !moves[lane]);
            other.len +=
                (matching_lanes(0, &to.hashes).count_zeros() - (32 - ENTRIES as u32)) as u16;
        }
        self.len -= other.len + displaced.len() as u16;
        for (hash, block) in displaced {
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
    fn entries_past_an_overflowing_line_are_found_and_removed() {
        let mut bucket = Bucket::new(0, 0);
        for block in 0..100 {
            bucket.insert(7, block);
        }
        for block in (0..100).rev() {
            assert!(bucket.find(7, |found| found == block).is_some());
            bucket.remove(7, block);
            assert!(bucket.find(7, |found| found == block).is_none());
        }
        assert_eq!(bucket.len, 0);
    }
}
