//! A copy of one rank's pages, for another replica: what its blocks do not show, made and taken over in slices. Pure.

use super::pages::{NO_PAGE, PageNumber};
use super::{PageFold, SLICE};
use crate::kv::event::{EngineHash, Tier};

/// Pages, each after the one that it follows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CopiedPages {
    /// Tokens of a page; 0 for a tree whose blocks are not folded from pages.
    pub page_size: u32,
    pub names: Vec<EngineHash>,
    /// How many positions before each page the page is that it follows; 0 where that page is not known.
    pub parents: Vec<u32>,
    /// The names of pages that are not known, by the position of the page after them, in order.
    pub named_parents: Vec<(u32, EngineHash)>,
    /// `page_size` for each page.
    pub tokens: Vec<u32>,
    /// Where each page is stored, and where the block that ends with it is: a bit for each tier, and three more.
    pub marks: Vec<u8>,
}

#[derive(Debug, Default)]
pub struct PageCopyCursor {
    next: PageNumber,
    /// The position of each page that was copied, plus one.
    positions: Vec<u32>,
    grafted: usize,
    named: usize,
}

impl CopiedPages {
    pub fn len(&self) -> usize {
        self.names.len()
    }

    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Whether the parts are of the same pages, each of which follows one before it and is stored somewhere.
    pub fn is_consistent(&self) -> bool {
        let pages = self.names.len();
        let is_before = |(position, parent): (usize, &u32)| *parent as usize <= position;
        let has_page = |(position, _): &(u32, EngineHash)| (*position as usize) < pages;
        let mut named = self
            .named_parents
            .iter()
            .zip(self.named_parents.iter().skip(1));
        let is_stored = |marks: &u8| {
            let (stored, whole) = (marks & 0b111, marks >> Tier::COUNT);
            stored | whole == stored
        };
        (self.is_empty() || PageFold::for_pages(self.page_size).is_some())
            && self.parents.len() == pages
            && self.marks.len() == pages
            && pages.checked_mul(self.page_size as usize) == Some(self.tokens.len())
            && self.parents.iter().enumerate().all(is_before)
            && self.named_parents.iter().all(has_page)
            && named.all(|((one, _), (next, _))| one < next)
            && self.marks.iter().all(is_stored)
    }
}

impl PageFold {
    /// Adds the next pages to a copy, about `pages` of them. Returns false when there are none left.
    pub fn copy_next(
        &self,
        cursor: &mut PageCopyCursor,
        pages: usize,
        copied: &mut CopiedPages,
    ) -> bool {
        let end = self.pages.numbers().end;
        copied.page_size = self.page_size;
        cursor.positions.resize(end as usize, 0);
        let until = copied.len() + pages;
        // Free numbers have a limit, too.
        let until_number = cursor.next.saturating_add(4 * pages as u32);
        let mut path = Vec::new();
        while copied.len() < until && cursor.next < until_number {
            if cursor.next >= end {
                return false;
            }
            let mut page = cursor.next;
            cursor.next += 1;
            if self.pages.is_free(page) {
                continue;
            }
            while page != NO_PAGE && cursor.positions[page as usize] == 0 {
                path.push(page);
                page = self.pages.get(page).parent;
            }
            while let Some(page) = path.pop() {
                let position = copied.len() as u32;
                cursor.positions[page as usize] = position + 1;
                let parent = self.pages.get(page).parent;
                copied.parents.push(match parent {
                    NO_PAGE => 0,
                    parent => position + 1 - cursor.positions[parent as usize],
                });
                if parent == NO_PAGE
                    && let Some(name) = self.pages.parent_name(page)
                {
                    copied.named_parents.push((position, name));
                }
                copied.names.push(self.pages.get(page).name);
                copied.tokens.extend_from_slice(self.pages.tokens(page));
                copied.marks.push(self.pages.get(page).marks());
            }
        }
        true
    }

    /// Takes over the next pages of a copy, about `pages` of them. Returns false when there are none left, or no more room.
    pub fn graft_next(
        &mut self,
        cursor: &mut PageCopyCursor,
        pages: usize,
        copied: &CopiedPages,
    ) -> bool {
        let size = copied.page_size as usize;
        let until = copied.len().min(cursor.grafted + pages);
        while cursor.grafted < until {
            // The oldest ones are as good as the others here.
            if cursor.grafted.is_multiple_of(SLICE) && !self.has_room_for(SLICE) {
                self.forgotten += (copied.len() - cursor.grafted) as u64;
                cursor.grafted = copied.len();
                break;
            }
            let position = cursor.grafted;
            cursor.grafted += 1;
            let named = copied.named_parents.get(cursor.named);
            let named = named.filter(|(at, _)| *at as usize == position);
            cursor.named += usize::from(named.is_some());
            let parent = match copied.parents[position] {
                0 => NO_PAGE,
                before => cursor.positions[position - before as usize],
            };
            let offset = match parent {
                NO_PAGE => 0,
                parent => self.next(self.pages.get(parent).offset),
            };
            let name = copied.names[position];
            let page = match self.pages.find(name) {
                // A replica that sends a page twice sends nothing that could be used.
                Some(page) => page,
                None => {
                    let tokens = &copied.tokens[position * size..(position + 1) * size];
                    let named = named.map(|(_, name)| *name).filter(|_| parent == NO_PAGE);
                    self.pages.add(name, parent, named, offset, tokens)
                }
            };
            cursor.positions.push(page);
            for tier in Tier::ALL {
                let marks = copied.marks[position] >> tier as u8;
                if marks & 1 == 1 {
                    self.pages.set_stored(page, tier);
                }
                if marks >> Tier::COUNT & 1 == 1 {
                    self.pages.get_mut(page).set_whole(tier);
                }
            }
        }
        self.charge();
        cursor.grafted < copied.len()
    }
}
