//! From an engine's name of a block to the block: one table for all workers of an index, since most
//! engines give the same content the same name. Only the writer reads it.
//!
//! Ten entries (16 bits of the hash, the block's number) and a count of those that went past fill a
//! cache line. Which block really has the name, the caller asks the block. Parts grow by themselves,
//! so that no event waits for the whole to be built anew.

use super::pages::BlockId;

const ENTRIES: usize = 10;
const PARTS: usize = 64;
const LANES: u64 = 0x0001_0001_0001_0001;

#[derive(Clone, Debug, Default)]
#[repr(align(64))]
struct Line {
    /// Four tags a word, a free place's is 0; the upper half of the last counts what went past.
    tags: [u64; 3],
    blocks: [BlockId; ENTRIES],
}

impl Line {
    /// Lanes whose tag may be `tag`, as their highest bits; the lowest of a word surely is, and those
    /// above it are all there.
    #[inline]
    fn like(&self, word: usize, tag: u64) -> u64 {
        let lanes = if word == 2 { 0x8000_8000 } else { LANES << 15 };
        let differ = self.tags[word] ^ (tag * LANES);
        differ.wrapping_sub(LANES) & !differ & lanes
    }

    #[inline]
    fn over(&self) -> u64 {
        self.tags[2] >> 32
    }

    /// The place of an entry with this tag that `is_it`.
    #[inline]
    fn find(&self, tag: u64, mut is_it: impl FnMut(BlockId) -> bool) -> Option<usize> {
        for word in 0..3 {
            let mut like = self.like(word, tag);
            while like != 0 {
                let at = word * 4 + like.trailing_zeros() as usize / 16;
                if self.tag(at) == tag && is_it(self.blocks[at]) {
                    return Some(at);
                }
                like &= like - 1;
            }
        }
        None
    }

    #[inline]
    fn tag(&self, at: usize) -> u64 {
        (self.tags[at / 4] >> (at % 4 * 16)) & 0xffff
    }

    #[inline]
    fn free(&self) -> Option<usize> {
        (0..3).find_map(|word| {
            let free = self.like(word, 0);
            (free != 0).then(|| word * 4 + free.trailing_zeros() as usize / 16)
        })
    }

    #[inline]
    fn set(&mut self, at: usize, tag: u64, block: BlockId) {
        let shift = at % 4 * 16;
        let word = &mut self.tags[at / 4];
        *word = (*word & !(0xffff << shift)) | (tag << shift);
        self.blocks[at] = block;
    }
}

#[derive(Debug)]
struct Part {
    lines: Vec<Line>,
    len: usize,
}

#[derive(Debug)]
pub(super) struct Names {
    parts: Box<[Part]>,
    bytes: usize,
}

/// A name, spread over all bits.
#[inline]
fn spread(name: u64) -> u64 {
    let product = u128::from(name ^ 0xa076_1d64_78bd_642f) * 0xe703_7ed1_a0b4_28db;
    (product as u64) ^ ((product >> 64) as u64)
}

impl Names {
    pub(super) fn new() -> Self {
        let part = || Part {
            lines: vec![Line::default()],
            len: 0,
        };
        Self {
            parts: (0..PARTS).map(|_| part()).collect(),
            bytes: PARTS * size_of::<Line>(),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Loads the line of a name. Called for many names in a row, the loads overlap, which is what a
    /// prefetch instruction would be for. The result means nothing.
    #[inline]
    pub(super) fn touch(&self, name: u64) -> u64 {
        let hash = spread(name);
        let part = &self.parts[part_of(hash)];
        part.lines[part.home(hash)].tags[0]
    }

    #[inline]
    pub(super) fn find(&self, name: u64, is_it: impl FnMut(BlockId) -> bool) -> Option<BlockId> {
        let hash = spread(name);
        let part = &self.parts[part_of(hash)];
        let (line, at) = part.find(hash, is_it)?;
        Some(part.lines[line].blocks[at])
    }

    /// The block that has a name, or none and then `block` has it from now on; `name_of` tells the
    /// names of the blocks that are there.
    #[inline]
    pub(super) fn find_or_insert(
        &mut self,
        name: u64,
        block: BlockId,
        is_it: impl FnMut(BlockId) -> bool,
        name_of: impl Fn(BlockId) -> u64,
    ) -> Option<BlockId> {
        let hash = spread(name);
        let part = &mut self.parts[part_of(hash)];
        if let Some((line, at)) = part.find(hash, is_it) {
            return Some(part.lines[line].blocks[at]);
        }
        if part.len * 5 >= part.lines.len() * ENTRIES * 4 {
            let before = part.lines.len();
            part.grow(name_of);
            self.bytes += (part.lines.len() - before) * size_of::<Line>();
        }
        part.insert(hash, block);
        None
    }

    #[inline]
    pub(super) fn remove(&mut self, name: u64, block: BlockId) {
        let hash = spread(name);
        self.parts[part_of(hash)].remove(hash, block);
    }
}

#[inline]
fn part_of(hash: u64) -> usize {
    (hash >> 16) as usize % PARTS
}

impl Part {
    #[inline]
    fn home(&self, hash: u64) -> usize {
        (((hash >> 32) * self.lines.len() as u64) >> 32) as usize
    }

    #[inline]
    fn next(&self, at: usize) -> usize {
        if at + 1 == self.lines.len() {
            0
        } else {
            at + 1
        }
    }

    #[inline]
    fn find(&self, hash: u64, mut is_it: impl FnMut(BlockId) -> bool) -> Option<(usize, usize)> {
        let tag = tag_of(hash);
        let mut line = self.home(hash);
        for _ in 0..self.lines.len() {
            if let Some(at) = self.lines[line].find(tag, &mut is_it) {
                return Some((line, at));
            }
            if self.lines[line].over() == 0 {
                break;
            }
            line = self.next(line);
        }
        None
    }

    #[inline]
    fn insert(&mut self, hash: u64, block: BlockId) {
        self.len += 1;
        let mut line = self.home(hash);
        loop {
            if let Some(at) = self.lines[line].free() {
                self.lines[line].set(at, tag_of(hash), block);
                return;
            }
            self.lines[line].tags[2] += 1 << 32;
            line = self.next(line);
        }
    }

    #[inline]
    fn remove(&mut self, hash: u64, block: BlockId) {
        let Some((line, at)) = self.find(hash, |found| found == block) else {
            return;
        };
        self.lines[line].set(at, 0, 0);
        self.len -= 1;
        let mut before = self.home(hash);
        while before != line {
            self.lines[before].tags[2] -= 1 << 32;
            before = self.next(before);
        }
    }

    /// Half as many lines again.
    #[cold]
    #[inline(never)]
    fn grow(&mut self, name_of: impl Fn(BlockId) -> u64) {
        // All names first: these loads are far apart, and none waits for another.
        let mut all = Vec::with_capacity(self.len);
        for line in &self.lines {
            let blocks = line.blocks.iter().enumerate();
            let taken = blocks.filter(|(at, _)| line.tag(*at) != 0);
            all.extend(taken.map(|(_, block)| (name_of(*block), *block)));
        }
        self.lines = vec![Line::default(); self.lines.len() + self.lines.len() / 2 + 1];
        self.len = 0;
        // Lines are in the order of the hashes, in the old table as in the new.
        for (name, block) in all {
            self.insert(spread(name), block);
        }
    }
}

#[inline]
fn tag_of(hash: u64) -> u64 {
    hash & 0xffff | 1
}
