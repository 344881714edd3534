//! The memory limit: new pages while there is room, else the pages that were stored longest ago are dropped.
//!
//! A page is dropped for all trees that own its blocks: a block that one tree of several loses frees nothing. Chains
//! lose their ends first, and a page counts as stored when a page that continues it was.

use std::cmp::Reverse;

use parking_lot::{RwLock, RwLockWriteGuard};

use super::Writer;
use crate::kv::block::SEGMENT_BLOCKS;
use crate::kv::index::pages::{ChainEnd, MAX_PAGES, Page, PageId, Pages, Slot};

/// What a page takes with its blocks' names.
const PAGE_BYTES: usize = size_of::<Page>() + SEGMENT_BLOCKS * 12;

/// At least this part of the pages is dropped at once, so that not every store looks for the oldest pages.
const MIN_EVICTED: usize = 32;

/// How often one piece drops pages. The next one goes on.
const MAX_ROUNDS: usize = 4;

/// Owners that lose a page before lookups get their turn.
const OWNERS_AT_ONCE: usize = 4;

impl Writer {
    /// Makes room for blocks after a chain's end. Returns false if there is none, or the tree has lost the end.
    pub(super) fn make_room(
        &mut self,
        lock: &RwLock<Pages>,
        slot: Slot,
        end: ChainEnd,
        blocks: usize,
    ) -> bool {
        // Each block may begin a page.
        if lock.read().in_use() + blocks > MAX_PAGES {
            return false;
        }
        let wanted = blocks / SEGMENT_BLOCKS + 2;
        let has_room = |writer: &Self| writer.memory.has_room_for_more(wanted * PAGE_BYTES);
        if has_room(self) {
            return true;
        }
        let mut rounds = 0;
        while rounds < MAX_ROUNDS && !has_room(self) && self.evict(lock, wanted) {
            rounds += 1;
        }
        let pages = lock.read();
        let owns_end = end.block.is_none_or(|block| {
            let page = pages.find(block.page());
            let page = page.filter(|page| page.has_path_at(block.offset(), end.path));
            page.is_some_and(|page| page.residency(slot, block.offset()).is_some())
        });
        // Pages that were dropped made room, whatever the tables take.
        owns_end && (rounds > 0 || has_room(self))
    }

    /// Drops at least `wanted` pages, if there are so many. Returns whether there were any.
    fn evict(&mut self, lock: &RwLock<Pages>, wanted: usize) -> bool {
        let pages = lock.read();
        self.note_continuations(&pages);
        let age = |page| {
            (
                self.stored_at[page as usize],
                Reverse(pages.get(page).depth),
                page,
            )
        };
        let mut oldest: Vec<_> = pages.ids().map(age).collect();
        drop(pages);
        let wanted = wanted.max(oldest.len() / MIN_EVICTED);
        if wanted < oldest.len() {
            oldest.select_nth_unstable(wanted);
            oldest.truncate(wanted);
        }
        oldest.sort_unstable();
        let mut pages = lock.write();
        for (_, _, page) in &oldest {
            self.evict_page(&mut pages, *page);
        }
        drop(pages);
        for slot in 0..self.trees.len() {
            if self.trees[slot].is_some() {
                self.change(slot as Slot, |_, tree| tree.shrink());
            }
        }
        self.shrink(lock);
        self.charge(&lock.read());
        !oldest.is_empty()
    }

    /// Notes at the pages before them when pages were stored.
    fn note_continuations(&mut self, pages: &Pages) {
        for page in pages.ids() {
            let stored_at = self.stored_at[page as usize];
            // What was stored before the last eviction was noted then.
            if stored_at < self.evicted_at {
                continue;
            }
            let mut page = page;
            while let Some(before) = page_before(pages, page) {
                let known = &mut self.stored_at[before as usize];
                if *known >= stored_at {
                    break;
                }
                *known = stored_at;
                page = before;
            }
        }
        self.evicted_at = self.clock;
    }

    /// Takes a page's blocks from all trees, which removes the page. Lookups get their turn between some owners.
    fn evict_page(&mut self, pages: &mut RwLockWriteGuard<'_, Pages>, page: PageId) {
        // The last owner first: no others move up in the list.
        let owners = pages.get(page).owners.iter().rev();
        let slots: Vec<Slot> = owners.map(|owner| owner.slot).collect();
        for slots in slots.chunks(OWNERS_AT_ONCE) {
            for slot in slots {
                let dropped = self.change(*slot, |writer, tree| {
                    tree.was_evicted = true;
                    writer.forget_in_page(pages, tree, page)
                });
                self.dropped_blocks += u64::from(dropped);
            }
            RwLockWriteGuard::bump(pages);
        }
    }
}

/// The page with the block before a page's first one.
fn page_before(pages: &Pages, page: PageId) -> Option<PageId> {
    let page = pages.get(page);
    let parent = page.parent?;
    let before = pages.find(parent.page())?;
    before
        .has_path_at(parent.offset(), page.parent_path)
        .then_some(parent.page())
}
