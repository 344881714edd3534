//! The pages of one rank's cache: a slab with the pages that each one follows, found by name. Pure.

mod page_move;

use std::hash::BuildHasher;

use hashbrown::HashTable;
use rustc_hash::{FxBuildHasher, FxHashMap};

pub use self::page_move::PageMove;
use crate::kv::event::{EngineHash, Tier};

/// A page's number in the slab.
pub(super) type PageNumber = u32;
pub(super) const NO_PAGE: PageNumber = u32::MAX;

/// What the table of names takes for each page at most: when it has just doubled, with removed names in almost half of it.
const NAME_BYTES: usize = 23;

#[derive(Clone, Copy, Debug)]
pub(super) struct Page {
    pub(super) name: EngineHash,
    /// The page before it. [`NO_PAGE`] at a prompt's start, and where that page is not known.
    pub(super) parent: PageNumber,
    /// Pages that have this one as their parent.
    followers: u32,
    /// By tier: stored pages that follow it.
    pub(super) children: [u32; Tier::COUNT],
    /// When it was last stored or continued.
    pub(super) used_at: u32,
    /// Pages before it in its block.
    pub(super) offset: u8,
    /// A bit for each tier in which it is stored.
    stored: u8,
    /// A bit for each tier in which the block that ends with it was reported as stored.
    whole: u8,
    /// The page before it is known by name alone; see [`Pages::named_parents`].
    has_named_parent: bool,
}

#[derive(Debug)]
pub(super) struct Pages {
    page_size: usize,
    slab: Vec<Page>,
    /// `page_size` tokens for each page.
    tokens: Vec<u32>,
    free: Vec<PageNumber>,
    /// Pages by their names, which stand in the slab.
    names: HashTable<PageNumber>,
    /// The names of pages that are not known, by the pages that follow them.
    named_parents: FxHashMap<PageNumber, EngineHash>,
}

impl Page {
    pub(super) fn is_stored(&self, tier: Tier) -> bool {
        self.stored >> tier as u8 & 1 == 1
    }

    pub(super) fn is_whole(&self, tier: Tier) -> bool {
        self.whole >> tier as u8 & 1 == 1
    }

    pub(super) fn set_whole(&mut self, tier: Tier) {
        self.whole |= 1 << tier as u8;
    }

    /// Returns whether it was.
    pub(super) fn clear_whole(&mut self, tier: Tier) -> bool {
        let was_whole = self.is_whole(tier);
        self.whole &= !(1 << tier as u8);
        was_whole
    }

    /// Where it is stored, and where its block is: a bit for each tier, and three more.
    pub(super) fn marks(&self) -> u8 {
        self.stored | self.whole << Tier::COUNT
    }
}

impl Pages {
    pub(super) fn new(page_size: u32) -> Self {
        Self {
            page_size: page_size as usize,
            slab: Vec::new(),
            tokens: Vec::new(),
            free: Vec::new(),
            names: HashTable::new(),
            named_parents: FxHashMap::default(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.slab.len() - self.free.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn bytes(&self) -> usize {
        self.slab.capacity() * size_of::<Page>()
            + (self.tokens.capacity() + self.free.capacity()) * 4
            + self.names.allocation_size()
            + self.named_parents.capacity() * 20
    }

    /// What so many pages take at most.
    pub(super) fn bytes_of(&self, pages: usize) -> usize {
        let grown = size_of::<Page>() + self.page_size * 4;
        let names = self.names.allocation_size().max(pages * NAME_BYTES);
        pages * (grown + grown / GROWTH) + names
    }

    pub(super) fn find(&self, name: EngineHash) -> Option<PageNumber> {
        let has_name = |page: &PageNumber| self.get(*page).name == name;
        self.names.find(hash_of(name), has_name).copied()
    }

    pub(super) fn get(&self, page: PageNumber) -> &Page {
        &self.slab[page as usize]
    }

    pub(super) fn get_mut(&mut self, page: PageNumber) -> &mut Page {
        &mut self.slab[page as usize]
    }

    pub(super) fn parent_mut(&mut self, page: PageNumber) -> Option<&mut Page> {
        match self.slab[page as usize].parent {
            NO_PAGE => None,
            parent => Some(&mut self.slab[parent as usize]),
        }
    }

    /// The name of the page before a page; none at a prompt's start.
    pub(super) fn parent_name(&self, page: PageNumber) -> Option<EngineHash> {
        let Page {
            parent,
            has_named_parent,
            ..
        } = *self.get(page);
        match (parent, has_named_parent) {
            (NO_PAGE, true) => self.named_parents.get(&page).copied(),
            (NO_PAGE, false) => None,
            (parent, _) => Some(self.get(parent).name),
        }
    }

    pub(super) fn tokens(&self, page: PageNumber) -> &[u32] {
        let first = page as usize * self.page_size;
        &self.tokens[first..first + self.page_size]
    }

    /// Adds a page that is stored nowhere yet. `parent_name` is the name of a parent that is not known.
    pub(super) fn add(
        &mut self,
        name: EngineHash,
        parent: PageNumber,
        parent_name: Option<EngineHash>,
        offset: u8,
        tokens: &[u32],
    ) -> PageNumber {
        let page = Page {
            name,
            parent,
            followers: 0,
            children: [0; Tier::COUNT],
            used_at: 0,
            offset,
            stored: 0,
            whole: 0,
            has_named_parent: parent_name.is_some(),
        };
        let number = match self.free.pop() {
            Some(number) => {
                self.slab[number as usize] = page;
                let first = number as usize * self.page_size;
                self.tokens[first..first + self.page_size].copy_from_slice(tokens);
                number
            }
            None => {
                grow(&mut self.slab, 1);
                grow(&mut self.tokens, tokens.len());
                self.slab.push(page);
                self.tokens.extend_from_slice(tokens);
                self.slab.len() as PageNumber - 1
            }
        };
        if let Some(parent_name) = parent_name {
            self.named_parents.insert(number, parent_name);
        }
        if parent != NO_PAGE {
            self.slab[parent as usize].followers += 1;
        }
        let slab = &self.slab;
        let of_page = |page: &PageNumber| hash_of(slab[*page as usize].name);
        self.names.insert_unique(hash_of(name), number, of_page);
        number
    }

    /// Marks a page as stored, and returns whether it was not.
    pub(super) fn set_stored(&mut self, page: PageNumber, tier: Tier) -> bool {
        let is_new = !self.get(page).is_stored(tier);
        if is_new {
            self.get_mut(page).stored |= 1 << tier as u8;
            if let Some(before) = self.parent_mut(page) {
                before.children[tier as usize] += 1;
            }
        }
        is_new
    }

    /// Marks a page as not stored, and returns whether it was.
    pub(super) fn clear_stored(&mut self, page: PageNumber, tier: Tier) -> bool {
        let was_stored = self.get(page).is_stored(tier);
        if was_stored {
            self.get_mut(page).stored &= !(1 << tier as u8);
            if let Some(before) = self.parent_mut(page) {
                let children = &mut before.children[tier as usize];
                *children = children.saturating_sub(1);
            }
        }
        was_stored
    }

    pub(super) fn is_leaf(&self, page: PageNumber) -> bool {
        self.get(page).followers == 0
    }

    /// Drops a page that is stored nowhere and that no page follows, and those before it of which the same is true then.
    pub(super) fn drop_unused(&mut self, page: PageNumber) {
        let mut page = page;
        while page != NO_PAGE {
            let Page {
                parent,
                followers,
                stored,
                ..
            } = *self.get(page);
            if followers > 0 || stored != 0 {
                return;
            }
            self.drop_leaf(page);
            page = parent;
        }
    }

    /// Forgets a page that no page follows, wherever it is stored, and those before it that were only kept for it.
    /// Returns the page before these.
    pub(super) fn forget_leaf(&mut self, page: PageNumber) -> PageNumber {
        for tier in Tier::ALL {
            self.clear_stored(page, tier);
        }
        let mut page = page;
        loop {
            let parent = self.get(page).parent;
            self.drop_leaf(page);
            if parent == NO_PAGE || !self.is_free(parent) {
                return parent;
            }
            page = parent;
        }
    }

    /// Forgets pages wherever they are stored, with those after them in their blocks. The pages after these know the one
    /// before them by name. Returns how many it forgot.
    pub(super) fn forget(&mut self, mut pages: Vec<PageNumber>) -> usize {
        let mut is_forgotten = vec![false; self.slab.len()];
        for page in &pages {
            is_forgotten[*page as usize] = true;
        }
        let mut known = 0;
        while known < pages.len() {
            known = pages.len();
            for page in self.numbers() {
                let Page { parent, offset, .. } = *self.get(page);
                let is_in_block = offset > 0 && parent != NO_PAGE && !self.is_free(page);
                if is_in_block && is_forgotten[parent as usize] && !is_forgotten[page as usize] {
                    is_forgotten[page as usize] = true;
                    pages.push(page);
                }
            }
        }
        for page in self.numbers() {
            let parent = self.get(page).parent;
            let is_cut = !is_forgotten[page as usize]
                && !self.is_free(page)
                && parent != NO_PAGE
                && is_forgotten[parent as usize];
            if is_cut {
                self.named_parents.insert(page, self.get(parent).name);
                let cut = self.get_mut(page);
                cut.parent = NO_PAGE;
                cut.has_named_parent = true;
            }
        }
        // Pages before those that are forgotten: they may have been kept only for these.
        let mut parents = Vec::new();
        for page in &pages {
            for tier in Tier::ALL {
                self.clear_stored(*page, tier);
            }
            self.remove_name(*page);
            self.named_parents.remove(page);
            let parent = self.get(*page).parent;
            if let Some(before) = self.parent_mut(*page) {
                before.followers = before.followers.saturating_sub(1);
                if !is_forgotten[parent as usize] {
                    parents.push(parent);
                }
            }
        }
        // Now that none of them is looked at any more.
        for page in &pages {
            let forgotten = self.get_mut(*page);
            (forgotten.stored, forgotten.followers) = (0, 0);
            forgotten.parent = NO_PAGE;
            self.free.push(*page);
        }
        for page in parents {
            // It may have been dropped with another one.
            if self.is_known(page) {
                self.drop_unused(page);
            }
        }
        if self.is_empty() {
            *self = Self::new(self.page_size as u32);
        }
        pages.len()
    }

    fn is_known(&self, page: PageNumber) -> bool {
        let of_number = self.slab.get(page as usize);
        of_number.is_some_and(|of| self.find(of.name) == Some(page))
    }

    fn drop_leaf(&mut self, page: PageNumber) {
        let Page {
            parent,
            has_named_parent,
            ..
        } = *self.get(page);
        self.remove_name(page);
        if has_named_parent {
            self.named_parents.remove(&page);
        }
        if parent != NO_PAGE {
            self.slab[parent as usize].followers -= 1;
        }
        // Shows that it is free; a page that is in use is stored somewhere, or has pages after it.
        self.slab[page as usize].stored = 0;
        self.free.push(page);
        if self.is_empty() {
            *self = Self::new(self.page_size as u32);
        }
    }

    fn remove_name(&mut self, page: PageNumber) {
        let hash = hash_of(self.get(page).name);
        if let Ok(entry) = self.names.find_entry(hash, |known| *known == page) {
            entry.remove();
        }
    }

    /// All pages, in no order. Numbers that are free are among them; those are stored nowhere and have no followers.
    pub(super) fn numbers(&self) -> std::ops::Range<PageNumber> {
        0..self.slab.len() as PageNumber
    }

    pub(super) fn is_free(&self, page: PageNumber) -> bool {
        let page = self.get(page);
        page.stored == 0 && page.followers == 0
    }
}

fn hash_of(name: EngineHash) -> u64 {
    FxBuildHasher.hash_one(name)
}

/// Vectors grow by this part of their length: doubled, they would take twice of what is counted for a moment.
const GROWTH: usize = 4;

fn grow<T>(vector: &mut Vec<T>, more: usize) {
    if vector.capacity() - vector.len() < more {
        vector.reserve_exact(vector.len() / GROWTH + more.max(64));
    }
}
