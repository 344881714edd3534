//! From a path to the page that begins with it. One writer, readers without a lock.
//!
//! Entries lie seven to a cache line beside a count of those that went past it, so a look costs one
//! miss, and a removal leaves neither a tombstone nor moves another entry: a reader finds whatever
//! stays. A full table is replaced by a larger one; readers of the old one finish there.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::pages::PageId;
use super::simd::prefetch;

const ENTRIES: usize = 7;

/// An entry is the low half of the hash above the page's number plus one; 0 is none. That half gives the
/// line, too, so that a larger table is made without a look at the pages, and it tells entries apart well
/// enough: with a million pages one look in 4,300 asks a page for nothing.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Line {
    entries: [AtomicU64; ENTRIES],
    /// Entries of this line or of one before it that lie further on.
    over: AtomicU64,
}

#[derive(Debug)]
pub(super) struct Table {
    lines: Box<[Line]>,
}

impl Table {
    pub(super) fn with_room_for(entries: usize) -> Self {
        // Three quarters full.
        let lines = (entries * 4).div_ceil(ENTRIES * 3).max(4);
        Self {
            lines: (0..lines).map(|_| Line::default()).collect(),
        }
    }

    pub(super) fn is_full(&self, entries: usize) -> bool {
        entries * 8 > self.lines.len() * ENTRIES * 7
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.lines)
    }

    /// Asks for the line of a hash ahead of its use.
    #[inline]
    pub(super) fn prefetch(&self, hash: u64) {
        prefetch(&self.lines[self.home(hash)]);
    }

    /// The page of a hash that `is_it`.
    #[inline]
    pub(super) fn find(&self, hash: u64, mut is_it: impl FnMut(PageId) -> bool) -> Option<PageId> {
        let mut at = self.home(hash);
        for _ in 0..self.lines.len() {
            let line = &self.lines[at];
            for entry in &line.entries {
                let entry = entry.load(Acquire);
                if (entry >> 32) as u32 == hash as u32
                    && entry as u32 != 0
                    && is_it(entry as u32 - 1)
                {
                    return Some(entry as u32 - 1);
                }
            }
            if line.over.load(Acquire) == 0 {
                break;
            }
            at = self.next(at);
        }
        None
    }

    pub(super) fn insert(&self, hash: u64, page: PageId) {
        self.put(entry(hash, page));
    }

    fn put(&self, new: u64) {
        let mut at = self.home(new >> 32);
        loop {
            let line = &self.lines[at];
            let free = line.entries.iter().find(|entry| entry.load(Relaxed) == 0);
            if let Some(free) = free {
                free.store(new, Release);
                return;
            }
            // Before the entry itself, which no reader could reach otherwise.
            line.over.store(line.over.load(Relaxed) + 1, Release);
            at = self.next(at);
        }
    }

    pub(super) fn remove(&self, hash: u64, page: PageId) {
        let old = entry(hash, page);
        let home = self.home(hash);
        let mut at = home;
        for _ in 0..self.lines.len() {
            let line = &self.lines[at];
            let entry = line.entries.iter().find(|entry| entry.load(Relaxed) == old);
            if let Some(entry) = entry {
                entry.store(0, Release);
                let mut before = home;
                while before != at {
                    let over = &self.lines[before].over;
                    over.store(over.load(Relaxed) - 1, Release);
                    before = self.next(before);
                }
                return;
            }
            if line.over.load(Relaxed) == 0 {
                return;
            }
            at = self.next(at);
        }
    }

    /// All pages in it.
    pub(super) fn pages(&self) -> impl Iterator<Item = PageId> {
        self.lines
            .iter()
            .flat_map(|line| &line.entries)
            .map(|entry| entry.load(Relaxed) as u32)
            .filter(|entry| *entry != 0)
            .map(|entry| entry - 1)
    }

    /// With room for more, and what is in this one. The order of lines is that of hashes in both, so
    /// this goes along them once.
    pub(super) fn grown(&self, entries: usize) -> Self {
        let larger = Self::with_room_for(entries);
        for line in &self.lines {
            for entry in &line.entries {
                match entry.load(Relaxed) {
                    0 => {}
                    entry => larger.put(entry),
                }
            }
        }
        larger
    }

    #[inline]
    fn home(&self, hash: u64) -> usize {
        ((u64::from(hash as u32) * self.lines.len() as u64) >> 32) as usize
    }

    #[inline]
    fn next(&self, at: usize) -> usize {
        if at + 1 == self.lines.len() {
            0
        } else {
            at + 1
        }
    }
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
        fn it_holds_what_was_put_in_and_not_taken_out(steps in proptest::collection::vec((0u32..80, proptest::bool::weighted(0.8)), 1..200)) {
            let mut table = Table::with_room_for(10);
            // Hashes that share lines, and some of them all bits.
            let hash = |page: u32| u64::from(page % 3) << 30 | u64::from(page % 7);
            let mut model = HashMap::new();
            for (page, put) in steps {
                if put && table.is_full(model.len() + 1) {
                    table = table.grown(model.len() + 1);
                }
                if put {
                    if model.insert(page, hash(page)).is_none() {
                        table.insert(hash(page), page);
                    }
                } else if model.remove(&page).is_some() {
                    table.remove(hash(page), page);
                }
                for page in 0..80 {
                    let found = table.find(hash(page), |it| it == page);
                    prop_assert_eq!(found.is_some(), model.contains_key(&page));
                }
                prop_assert_eq!(table.pages().count(), model.len());
            }
        }
    }
}
