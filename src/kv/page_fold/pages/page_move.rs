//! Gives the memory of removed pages back: those that are left move into less memory and get new numbers, in slices.
//! Pure.

use super::{NO_PAGE, PageNumber, Pages, hash_of};

/// So few pages are not worth moving.
const MIN_SLAB: usize = 64;

/// How far the pages that are left have moved. None may come, go or change before all have.
#[derive(Debug)]
pub struct PageMove {
    /// The new number of each page that was looked at. [`NO_PAGE`] for a number that is free.
    numbers: Vec<PageNumber>,
    moved: Pages,
    /// How many of the moved pages have their parent's new number.
    linked: usize,
}

impl PageMove {
    /// What it takes beside the pages as they were.
    pub(in crate::kv::page_fold) fn bytes(&self) -> usize {
        self.moved.bytes() + self.numbers.capacity() * size_of::<PageNumber>()
    }
}

impl Pages {
    /// Begins to give memory back, if most of it is unused. At least three times as many pages were removed before as
    /// move, so the slices together take no longer than the removals did.
    pub(in crate::kv::page_fold) fn begin_move(&self) -> Option<PageMove> {
        if self.slab.len() <= MIN_SLAB + self.len() * 4 {
            return None;
        }
        let mut moved = Self::new(self.page_size as u32);
        moved.slab.reserve_exact(self.len());
        moved.tokens.reserve_exact(self.len() * self.page_size);
        // An empty table has no names to put elsewhere.
        moved.names.reserve(self.len(), |_| 0);
        moved.named_parents.reserve(self.named_parents.len());
        Some(PageMove {
            numbers: Vec::with_capacity(self.slab.len()),
            moved,
            linked: 0,
        })
    }

    /// Moves the next pages: looks at `pages` of them. Returns false once all have moved and the memory is given back.
    pub(in crate::kv::page_fold) fn move_next(
        &mut self,
        page_move: &mut PageMove,
        pages: usize,
    ) -> bool {
        let PageMove {
            numbers,
            moved,
            linked,
        } = page_move;
        if numbers.len() < self.slab.len() {
            let until = self.slab.len().min(numbers.len() + pages);
            for page in numbers.len() as PageNumber..until as PageNumber {
                numbers.push(self.move_page(page, moved));
            }
            return true;
        }
        // A page may stand before its parent, so numbers of parents are known only now.
        let until = moved.slab.len().min(*linked + pages);
        for page in &mut moved.slab[*linked..until] {
            if page.parent != NO_PAGE {
                page.parent = numbers[page.parent as usize];
            }
        }
        *linked = until;
        if until < moved.slab.len() {
            return true;
        }
        *self = std::mem::replace(moved, Self::new(self.page_size as u32));
        false
    }

    /// Returns the page's new number; [`NO_PAGE`] for a number that is free.
    fn move_page(&self, page: PageNumber, moved: &mut Self) -> PageNumber {
        if self.is_free(page) {
            return NO_PAGE;
        }
        let number = moved.slab.len() as PageNumber;
        let of_page = *self.get(page);
        moved.slab.push(of_page);
        moved.tokens.extend_from_slice(self.tokens(page));
        if of_page.has_named_parent
            && let Some(name) = self.named_parents.get(&page)
        {
            moved.named_parents.insert(number, *name);
        }
        let slab = &moved.slab;
        let hash = |page: &PageNumber| hash_of(slab[*page as usize].name);
        moved
            .names
            .insert_unique(hash_of(of_page.name), number, hash);
        number
    }
}
