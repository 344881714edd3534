//! A copy of one tree, for another replica: made in slices, so that neither events of other ranks nor lookups wait
//! for the whole of it, and stored in an empty tree.
//!
//! Between two slices the tree's own events must wait. Other trees may change, and the memory limit may take blocks
//! away; those are cached all the same.

use std::ops::Range;
use std::vec;

use rustc_hash::FxHashMap;

use super::pages::PageId;
use super::tree::Tree;
use super::types::{CopiedBlocks, CopyReport, NewBlock, Parent, USUAL_COPIES};
use crate::kv::event::{EngineHash, Tier};

#[derive(Debug)]
pub struct CopyCursor {
    pages: vec::IntoIter<PageId>,
    pub(super) names: FxHashMap<u64, EngineHash>,
}

/// How far the storing of a copy has come.
#[derive(Clone, Copy, Debug, Default)]
pub struct GraftCursor {
    run: usize,
    block: usize,
    copies: usize,
    /// Blocks that could not be stored, for want of the block before them.
    pub missing: u64,
}

/// More copies than this are stored as "at least one": they would cost as many stores.
const MAX_COUNTED_COPIES: u32 = 64;

impl Tree {
    pub fn begin_copy(&self) -> CopyCursor {
        let pages = self.read(Vec::new(), |writer, pages, slot| {
            writer.pages_by_depth(pages, slot)
        });
        CopyCursor {
            pages: pages.into_iter(),
            names: FxHashMap::default(),
        }
    }

    /// Adds the next blocks to a copy, about `blocks` of them. Returns false when there are none left.
    pub fn copy_next(
        &self,
        cursor: &mut CopyCursor,
        blocks: usize,
        copied: &mut CopiedBlocks,
    ) -> bool {
        let until = copied.len() + blocks;
        self.read(false, |writer, pages, slot| {
            while copied.len() < until {
                let Some(page) = cursor.pages.next() else {
                    return false;
                };
                writer.copy_page(pages, slot, page, &mut cursor.names, copied);
            }
            true
        })
    }

    /// Stores the next blocks of a copy, about `blocks` of them. Returns false when there are none left.
    pub fn graft_next(
        &mut self,
        cursor: &mut GraftCursor,
        blocks: usize,
        copied: &CopiedBlocks,
    ) -> bool {
        let until = cursor.block + blocks;
        while cursor.block < until {
            let Some(run) = copied.runs.get(cursor.run) else {
                return false;
            };
            cursor.run += 1;
            let end = (cursor.block + run.len as usize).min(copied.blocks.len());
            let mut parent = run.parent;
            while cursor.block < end {
                let (alike, copies) = cursor.take_alike(copied, end);
                let last = copied.blocks[alike.end - 1].name;
                self.graft(parent, &copied.blocks[alike], copies, cursor);
                parent = Parent::Block(last);
            }
        }
        true
    }

    fn graft(
        &mut self,
        parent: Parent,
        blocks: &[NewBlock],
        copies: [u32; Tier::COUNT],
        cursor: &mut GraftCursor,
    ) {
        for (tier, copies) in Tier::ALL.into_iter().zip(copies) {
            let (times, report) = match copies {
                ..=MAX_COUNTED_COPIES => (copies, CopyReport::OneMore),
                _ => (1, CopyReport::AtLeastOne),
            };
            for _ in 0..times {
                if self.store(parent, blocks, tier, report).is_err() {
                    cursor.missing += blocks.len() as u64;
                    return;
                }
            }
        }
    }
}

impl GraftCursor {
    /// The next blocks that have the same copies, up to `end`.
    fn take_alike(
        &mut self,
        copied: &CopiedBlocks,
        end: usize,
    ) -> (Range<usize>, [u32; Tier::COUNT]) {
        let first = self.block;
        let mut copies = None;
        while self.block < end {
            let noted = copied.copies.get(self.copies);
            let noted = noted.filter(|(position, _)| *position as usize == self.block);
            let of_block = noted.map_or(USUAL_COPIES, |(_, copies)| *copies);
            if *copies.get_or_insert(of_block) != of_block {
                break;
            }
            self.copies += usize::from(noted.is_some());
            self.block += 1;
        }
        (first..self.block, copies.unwrap_or(USUAL_COPIES))
    }
}
