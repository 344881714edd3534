//! Finds pages by their names: a table of page numbers alone, since the names stand in the slab. Pure.

use crate::kv::event::EngineHash;

/// A page's number in the slab.
pub(super) type PageNumber = u32;
pub(super) const NO_PAGE: PageNumber = u32::MAX;

/// Linear probing; at most three quarters of the slots are in use.
#[derive(Debug, Default)]
pub(super) struct Names {
    slots: Vec<PageNumber>,
    len: usize,
}

const MIN_SLOTS: usize = 64;

impl Names {
    /// For each page, when the table has just grown.
    pub(super) const MAX_BYTES: usize = 11;

    pub(super) fn bytes(&self) -> usize {
        self.slots.capacity() * size_of::<PageNumber>()
    }

    /// Engines name pages by hashes, but nothing forces them to.
    fn home(&self, name: EngineHash) -> usize {
        let spread = (name.0 ^ name.0 >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (spread >> 32) as usize & (self.slots.len() - 1)
    }

    fn next(&self, slot: usize) -> usize {
        (slot + 1) & (self.slots.len() - 1)
    }

    pub(super) fn find(
        &self,
        name: EngineHash,
        is_it: impl Fn(PageNumber) -> bool,
    ) -> Option<PageNumber> {
        if self.slots.is_empty() {
            return None;
        }
        let mut slot = self.home(name);
        loop {
            match self.slots[slot] {
                NO_PAGE => return None,
                page if is_it(page) => return Some(page),
                _ => slot = self.next(slot),
            }
        }
    }

    /// Inserts a page whose name is not in the table.
    pub(super) fn insert(
        &mut self,
        name: EngineHash,
        page: PageNumber,
        name_of: impl Fn(PageNumber) -> EngineHash,
    ) {
        if (self.len + 1) * 4 > self.slots.len() * 3 {
            let slots = (self.slots.len() * 2).max(MIN_SLOTS);
            let old = std::mem::replace(&mut self.slots, vec![NO_PAGE; slots]);
            for page in old.into_iter().filter(|page| *page != NO_PAGE) {
                self.put(name_of(page), page);
            }
        }
        self.put(name, page);
        self.len += 1;
    }

    fn put(&mut self, name: EngineHash, page: PageNumber) {
        let mut slot = self.home(name);
        while self.slots[slot] != NO_PAGE {
            slot = self.next(slot);
        }
        self.slots[slot] = page;
    }

    pub(super) fn remove(
        &mut self,
        name: EngineHash,
        page: PageNumber,
        name_of: impl Fn(PageNumber) -> EngineHash,
    ) {
        let mut hole = self.home(name);
        while self.slots[hole] != page {
            if self.slots[hole] == NO_PAGE {
                return;
            }
            hole = self.next(hole);
        }
        self.len -= 1;
        // Pages after the hole move into it, unless their own place is behind it.
        let mut slot = hole;
        loop {
            self.slots[hole] = NO_PAGE;
            loop {
                slot = self.next(slot);
                let page = self.slots[slot];
                if page == NO_PAGE {
                    return;
                }
                let mask = self.slots.len() - 1;
                let home = self.home(name_of(page));
                let from_home = slot.wrapping_sub(home) & mask;
                let from_hole = slot.wrapping_sub(hole) & mask;
                if from_home >= from_hole {
                    self.slots[hole] = page;
                    hole = slot;
                    break;
                }
            }
        }
    }
}
