//! From an engine's name of a block to the block: one table for all workers of an index, since most
//! engines give the same content the same name. Only the writer reads it.
//!
//! Eight entries (32 bits of the hash, the block's number) fill a cache line. Which block really has
//! the name, the caller asks the block. The table is a directory of segments; a full segment is split
//! in two by its next bit of the hash, which the entries keep, so growing reads no names, copies
//! nothing twice, takes no memory but the new half, and no event waits for the whole to be built anew.

mod segment;

use self::segment::{LINES_BYTES, Segment};
use super::pages::BlockId;
use super::simd::prefetch;

/// Past so many halvings a segment is not split, so that names whose hashes are alike by intent take
/// neither memory nor time without a bound. Four times what the largest index needs.
const DEPTH_MAX: u32 = 20;

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
        self.segments.len() * LINES_BYTES
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
        prefetch(self.segments[self.segment_of(hash)].home(hash));
    }

    #[inline]
    pub(super) fn find(&self, name: u64, is_it: impl FnMut(BlockId) -> bool) -> Option<BlockId> {
        let hash = spread(name);
        let segment = &self.segments[self.segment_of(hash)];
        segment.find(hash, is_it)
    }

    /// Gives a name to a block, if it is plain from the table alone that no block has it.
    #[inline]
    pub(super) fn insert_plainly(&mut self, name: u64, block: BlockId) -> bool {
        let hash = spread(name);
        let index = self.segment_of(hash);
        let segment = &mut self.segments[index];
        if segment.is_full() || segment.has_like(hash) {
            return false;
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
        if let Some(owner) = segment.find(hash, is_it) {
            return Naming::Taken(owner);
        }
        if segment.is_full() {
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
            let depth = self.segments[index].depth();
            if !self.segments[index].is_full() {
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

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::segment::SEGMENT_MAX;
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
}
