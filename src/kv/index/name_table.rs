//! Hash table from an engine's name of a block to the block: one for all workers of an index, since
//! most engines give the same content the same name. Only the writer uses it.
//!
//! This is extendible hashing: a directory of buckets, where a full bucket is split in two by the next
//! bit of the hash. Entries keep 32 bits of the hash, so growing reads no names and copies no entry
//! twice, takes memory only for the new bucket, and no event waits while a whole table is rebuilt. Two buckets that
//! once were one are merged again when few entries are left. The table has no names: a caller checks with the block
//! itself whether it has the name.

mod bucket;

use self::bucket::{Bucket, LINES_BYTES};
use super::pages::BlockId;

/// Buckets are split at most this often, so that an engine whose names have the same hash on purpose
/// cannot take memory or time without a limit. The largest index needs two less.
const MAX_DEPTH: u32 = 20;

#[derive(Debug)]
pub(super) struct NameTable {
    /// The bucket of each value of the first `depth` bits of a hash.
    directory: Vec<u32>,
    depth: u32,
    buckets: Vec<Bucket>,
    /// Buckets that share as many bits as the directory distinguishes.
    deepest: usize,
    max_depth: u32,
    /// Hashes and blocks of entries that are to be removed. Their blocks do not have the names any more, or a name was
    /// entered anew: then there are two equal entries, and it does not matter which one goes.
    stale: Vec<(u32, BlockId)>,
}

/// Entries are removed once so many are stale, the oldest ones: their cache lines have come by then.
const MAX_STALE: usize = 96;
const REMOVED_AT_ONCE: usize = 64;

/// The outcome of giving a block a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Insert {
    Done,
    /// Another block has the name.
    Taken(BlockId),
    /// Too many names have nearly the same hash.
    NoRoom,
}

/// The hash of a name, for several uses of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct NameHash(u32);

impl NameHash {
    #[inline]
    pub(super) fn of(name: u64) -> Self {
        Self(spread(name))
    }
}

/// Never 0, which stands for a free entry.
#[inline]
fn spread(name: u64) -> u32 {
    let product = u128::from(name ^ 0xa076_1d64_78bd_642f) * 0xe703_7ed1_a0b4_28db;
    let hash = (product as u64) ^ ((product >> 64) as u64);
    ((hash >> 32) as u32).max(1)
}

impl NameTable {
    pub(super) fn new() -> Self {
        Self::with_max_depth(MAX_DEPTH)
    }

    fn with_max_depth(max_depth: u32) -> Self {
        Self {
            directory: vec![0],
            depth: 0,
            buckets: vec![Bucket::new(0, 0)],
            deepest: 1,
            max_depth,
            stale: Vec::with_capacity(MAX_STALE),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.buckets.len() * LINES_BYTES
            + self.buckets.capacity() * size_of::<Bucket>()
            + self.directory.capacity() * 4
            + self.stale.capacity() * size_of::<(u32, BlockId)>()
    }

    #[cfg(test)]
    pub(super) fn recount(&self) -> usize {
        let buckets = self.buckets.iter().map(Bucket::recount);
        let stale = MAX_STALE * size_of::<(u32, BlockId)>();
        buckets.sum::<usize>() + size_of_val(&*self.directory) + stale
    }

    #[inline]
    fn bucket_of(&self, hash: u32) -> usize {
        let first = (u64::from(hash) << self.depth) >> 32;
        self.directory[first as usize] as usize
    }

    /// Asks for the cache lines that giving a block this name reads.
    #[inline]
    pub(super) fn prefetch(&self, name: NameHash) {
        let NameHash(hash) = name;
        self.buckets[self.bucket_of(hash)].prefetch_for_insert(hash);
    }

    #[inline]
    pub(super) fn find(&self, name: u64, matches: impl FnMut(BlockId) -> bool) -> Option<BlockId> {
        let hash = spread(name);
        let bucket = &self.buckets[self.bucket_of(hash)];
        bucket.find(hash, matches)
    }

    /// Gives a name to a block if the table alone shows that no block has it: no entry has its hash.
    #[inline]
    pub(super) fn insert_if_new(&mut self, name: NameHash, block: BlockId) -> bool {
        let NameHash(hash) = name;
        let index = self.bucket_of(hash);
        let bucket = &mut self.buckets[index];
        !bucket.is_full() && bucket.insert_if_new(hash, block)
    }

    /// Gives a name to a block, unless another has it already.
    #[inline]
    pub(super) fn insert(
        &mut self,
        name: u64,
        block: BlockId,
        matches: impl FnMut(BlockId) -> bool,
    ) -> Insert {
        let hash = spread(name);
        let mut index = self.bucket_of(hash);
        let bucket = &self.buckets[index];
        if let Some(owner) = bucket.find(hash, matches) {
            return Insert::Taken(owner);
        }
        if bucket.is_full() {
            match self.split(hash) {
                Some(split) => index = split,
                None => return Insert::NoRoom,
            }
        }
        self.buckets[index].insert(hash, block);
        Insert::Done
    }

    /// Removes the name of a block that no longer has it, now or a little later: the caller need not wait for the
    /// entry's cache line.
    #[inline]
    pub(super) fn remove_soon(&mut self, name: u64, block: BlockId) {
        let hash = spread(name);
        self.buckets[self.bucket_of(hash)].prefetch(hash);
        if self.stale.len() == MAX_STALE {
            self.remove_stale(REMOVED_AT_ONCE);
        }
        self.stale.push((hash, block));
    }

    /// Removes all names that are to be removed.
    pub(super) fn remove_all_stale(&mut self) {
        self.remove_stale(self.stale.len());
    }

    #[inline(never)]
    fn remove_stale(&mut self, oldest: usize) {
        let mut stale = std::mem::take(&mut self.stale);
        for (hash, block) in stale.drain(..oldest) {
            self.remove(hash, block);
        }
        self.stale = stale;
    }

    #[inline]
    fn remove(&mut self, hash: u32, block: BlockId) {
        let index = self.bucket_of(hash);
        let bucket = &mut self.buckets[index];
        bucket.remove(hash, block);
        if bucket.is_sparse() {
            self.merge(hash);
        }
    }

    /// Merges the bucket of a hash with the one it was split from, as long as both together are at most half full.
    #[cold]
    #[inline(never)]
    fn merge(&mut self, hash: u32) {
        loop {
            let index = self.bucket_of(hash);
            let bucket = &self.buckets[index];
            let depth = bucket.depth();
            if depth == 0 || !bucket.is_sparse() {
                return;
            }
            let other = (bucket.prefix() ^ 1) as usize;
            let other = self.directory[other << (self.depth - depth)] as usize;
            if self.buckets[other].depth() != depth || !bucket.fits(&self.buckets[other]) {
                return;
            }
            let last = self.buckets.len() - 1;
            let moved = self.buckets.swap_remove(other);
            let index = if index == last { other } else { index };
            self.buckets[index].merge(&moved);
            self.point_to(index);
            if self.buckets.capacity() > self.buckets.len() * 4 {
                self.buckets.shrink_to(self.buckets.len() * 2);
            }
            if other < self.buckets.len() {
                self.point_to(other);
            }
            if depth == self.depth {
                self.deepest -= 2;
            }
            while self.deepest == 0 && self.depth > 0 {
                self.directory = self.directory.iter().step_by(2).copied().collect();
                self.depth -= 1;
                let depths = self.buckets.iter().map(Bucket::depth);
                self.deepest = depths.filter(|depth| *depth == self.depth).count();
            }
        }
    }

    /// Sets the directory's entries of a bucket.
    fn point_to(&mut self, bucket: usize) {
        let depth = self.buckets[bucket].depth();
        let first = self.buckets[bucket].prefix() as usize;
        let each = 1 << (self.depth - depth);
        self.directory[first * each..(first + 1) * each].fill(bucket as u32);
    }

    /// Splits the bucket of a hash until there is room for it. Returns that bucket.
    #[cold]
    #[inline(never)]
    fn split(&mut self, hash: u32) -> Option<usize> {
        loop {
            let index = self.bucket_of(hash);
            let depth = self.buckets[index].depth();
            if !self.buckets[index].is_full() {
                return Some(index);
            }
            if depth == self.max_depth {
                return None;
            }
            if depth == self.depth {
                let twice = self.directory.iter().flat_map(|bucket| [*bucket; 2]);
                self.directory = twice.collect();
                self.depth += 1;
                self.deepest = 0;
            }
            // The new bucket gets the hashes that share the bits so far and have the next one set.
            let new = self.buckets[index].split();
            self.buckets.push(new);
            self.point_to(self.buckets.len() - 1);
            if depth + 1 == self.depth {
                self.deepest += 2;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::bucket::MAX_ENTRIES;
    use super::*;

    fn check(max_depth: u32, names: u64, steps: Vec<(u64, bool)>) {
        let mut table = NameTable::with_max_depth(max_depth);
        let mut model: HashMap<u64, BlockId> = HashMap::new();
        for (name, put) in steps {
            let name = name % names;
            let block = name as u32;
            if put {
                let expected = model.get(&name).copied();
                match table.insert(name, block, |block| expected == Some(block)) {
                    Insert::Taken(block) => assert_eq!(Some(block), expected),
                    Insert::Done => assert_eq!(model.insert(name, block), None),
                    Insert::NoRoom => {
                        let entries = model.len() + table.stale.len();
                        assert!(entries >= MAX_ENTRIES as usize && expected.is_none())
                    }
                }
            } else if model.remove(&name).is_some() {
                table.remove_soon(name, block);
            }
        }
        for name in 0..names {
            let expected = model.get(&name).copied();
            assert_eq!(table.find(name, |block| expected == Some(block)), expected);
        }
        table.remove_all_stale();
        for name in 0..names {
            let found = table.find(name, |block| u64::from(block) == name);
            assert_eq!(found, model.get(&name).copied());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20))]

        #[test]
        fn it_has_the_names_that_were_inserted_and_not_removed(
            steps in proptest::collection::vec((any::<u64>(), proptest::bool::weighted(0.8)), 1..20_000),
            names in prop_oneof![Just(100u64), Just(20_000)],
            max_depth in prop_oneof![Just(0), Just(2), Just(MAX_DEPTH)],
        ) {
            check(max_depth, names, steps);
        }
    }

    #[test]
    fn buckets_and_directory_shrink_when_names_are_removed() {
        let mut table = NameTable::new();
        let empty = table.bytes();
        let names = 0..200_000u64;
        for name in names.clone() {
            assert_eq!(table.insert(name, name as u32, |_| false), Insert::Done);
        }
        let full = table.bytes();
        for name in names.clone().filter(|name| name % 100 > 0) {
            table.remove_soon(name, name as u32);
        }
        table.remove_all_stale();
        assert!(table.bytes() < full / 20, "{} of {full}", table.bytes());
        for name in names.clone() {
            let found = table.find(name, |block| u64::from(block) == name);
            assert_eq!(found, (name % 100 == 0).then_some(name as u32));
        }
        for name in names.filter(|name| name % 100 == 0) {
            table.remove_soon(name, name as u32);
        }
        table.remove_all_stale();
        assert_eq!((table.buckets.len(), table.directory.len()), (1, 1));
        assert!(table.bytes() <= empty + 64 * size_of::<Bucket>());
    }

    #[test]
    fn names_with_the_same_hash_bits_find_no_room_at_last() {
        let mut table = NameTable::with_max_depth(2);
        let done = (0..10_000).filter(|name| {
            table.insert(*name, *name as u32, |block| u64::from(block) == *name) == Insert::Done
        });
        assert_eq!(done.count(), 4 * MAX_ENTRIES as usize);
        assert_eq!(table.buckets.len(), 4);
    }
}
