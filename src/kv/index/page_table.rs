//! Hash table from a path hash to the page that begins with it. One writer; readers take no lock.
//!
//! A cache line has seven entries and a count of the entries that overflowed past it. So a lookup costs
//! one cache miss, and a removal needs no tombstone and moves no other entry: a reader finds whatever
//! stays. A full table is replaced by a larger one; readers of the old one finish there.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::pages::PageId;
use super::simd::prefetch;
use super::sync::AtomicU64;

const ENTRIES: usize = 7;

/// An entry is the low half of the hash, above the page's number plus one; 0 is none. That half also gives
/// the line, so a larger table can be made without looking at the pages. It distinguishes entries well
/// enough: with a million pages one lookup in 4,300 looks at a wrong page.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Line {
    entries: [AtomicU64; ENTRIES],
    /// Entries that belong in this line or one before it and lie in a later one.
    overflow: AtomicU64,
}

#[derive(Debug)]
pub(super) struct PageTable {
    lines: Box<[Line]>,
}

impl PageTable {
    pub(super) fn with_room_for(entries: usize) -> Self {
        let lines = (0..lines_for(entries)).map(|_| Line::default());
        Self {
            lines: lines.collect(),
        }
    }

    pub(super) fn is_full(&self, entries: usize) -> bool {
        entries * 8 > self.lines.len() * ENTRIES * 7
    }

    /// Whether a table with room for so many entries would be less than a quarter of this one.
    pub(super) fn is_sparse(&self, entries: usize) -> bool {
        lines_for(entries) * 4 < self.lines.len()
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.lines)
    }

    /// Asks for the cache line of a hash ahead of its use.
    #[inline]
    pub(super) fn prefetch(&self, hash: u64) {
        prefetch(&self.lines[self.home(hash)]);
    }

    /// The page of a hash that `matches`.
    #[inline]
    pub(super) fn find(
        &self,
        hash: u64,
        mut matches: impl FnMut(PageId) -> bool,
    ) -> Option<PageId> {
        let mut index = self.home(hash);
        for _ in 0..self.lines.len() {
            let line = &self.lines[index];
            for entry in &line.entries {
                let entry = entry.load(Acquire);
                if (entry >> 32) as u32 == hash as u32
                    && entry as u32 != 0
                    && matches(entry as u32 - 1)
                {
                    return Some(entry as u32 - 1);
                }
            }
            if line.overflow.load(Acquire) == 0 {
                break;
            }
            index = self.next(index);
        }
        None
    }

    pub(super) fn insert(&self, hash: u64, page: PageId) {
        self.put(entry(hash, page));
    }

    fn put(&self, new: u64) {
        let mut index = self.home(new >> 32);
        loop {
            let line = &self.lines[index];
            let free = line.entries.iter().find(|entry| entry.load(Relaxed) == 0);
            if let Some(free) = free {
                free.store(new, Release);
                return;
            }
            // Before the entry itself is stored: no reader could reach it otherwise.
            line.overflow
                .store(line.overflow.load(Relaxed) + 1, Release);
            index = self.next(index);
        }
    }

    pub(super) fn remove(&self, hash: u64, page: PageId) {
        let old = entry(hash, page);
        let home = self.home(hash);
        let mut index = home;
        for _ in 0..self.lines.len() {
            let line = &self.lines[index];
            let entry = line.entries.iter().find(|entry| entry.load(Relaxed) == old);
            if let Some(entry) = entry {
                entry.store(0, Release);
                let mut before = home;
                while before != index {
                    let overflow = &self.lines[before].overflow;
                    overflow.store(overflow.load(Relaxed) - 1, Release);
                    before = self.next(before);
                }
                return;
            }
            if line.overflow.load(Relaxed) == 0 {
                return;
            }
            index = self.next(index);
        }
    }

    /// All pages in the table.
    pub(super) fn pages(&self) -> impl Iterator<Item = PageId> {
        self.lines
            .iter()
            .flat_map(|line| &line.entries)
            .map(|entry| entry.load(Relaxed) as u32)
            .filter(|entry| *entry != 0)
            .map(|entry| entry - 1)
    }

    /// A table with room for so many entries, and the entries of this one. The lines of both are in the order of
    /// hashes, so one pass is enough.
    pub(super) fn resized(&self, entries: usize) -> Self {
        let new = Self::with_room_for(entries);
        for line in &self.lines {
            for entry in &line.entries {
                match entry.load(Relaxed) {
                    0 => {}
                    entry => new.put(entry),
                }
            }
        }
        new
    }

    #[inline]
    fn home(&self, hash: u64) -> usize {
        ((u64::from(hash as u32) * self.lines.len() as u64) >> 32) as usize
    }

    #[inline]
    fn next(&self, index: usize) -> usize {
        if index + 1 == self.lines.len() {
            0
        } else {
            index + 1
        }
    }
}

/// Three quarters full.
fn lines_for(entries: usize) -> usize {
    (entries * 4).div_ceil(ENTRIES * 3).max(4)
}

#[inline]
fn entry(hash: u64, page: PageId) -> u64 {
    hash << 32 | (u64::from(page) + 1)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_has_the_entries_that_were_inserted_and_not_removed(steps in proptest::collection::vec((0u32..80, proptest::bool::weighted(0.8)), 1..200)) {
            let mut table = PageTable::with_room_for(10);
            // Hashes that share lines; some are equal.
            let hash = |page: u32| u64::from(page % 3) << 30 | u64::from(page % 7);
            let mut model = HashMap::new();
            for (page, put) in steps {
                if put && table.is_full(model.len() + 1) {
                    table = table.resized(model.len() + 1);
                }
                if put {
                    if model.insert(page, hash(page)).is_none() {
                        table.insert(hash(page), page);
                    }
                } else if model.remove(&page).is_some() {
                    table.remove(hash(page), page);
                }
                for page in 0..80 {
                    let found = table.find(hash(page), |found| found == page);
                    prop_assert_eq!(found.is_some(), model.contains_key(&page));
                }
                prop_assert_eq!(table.pages().count(), model.len());
            }
        }
    }
}
