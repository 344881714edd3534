//! Copies a tree's blocks page by page, for another replica.

use std::sync::atomic::Ordering::Relaxed;

use rustc_hash::FxHashMap;

use super::Writer;
use super::copies::UNKNOWN;
use crate::kv::block::{ChainRoot, PathHash};
use crate::kv::event::EngineHash;
use crate::kv::index::owner_sets::{Residency, Slot};
use crate::kv::index::pages::{CHUNK, PageId, block_id};
use crate::kv::index::shared::Shared;
use crate::kv::index::types::{CopiedBlocks, NewBlock, Parent, TreeBlock};

impl Writer {
    /// The pages of a tree, those that are nearer to the start of their chains first: every block comes after the
    /// one before it.
    pub(in crate::kv::index) fn pages_by_depth(&self, slot: Slot) -> Vec<PageId> {
        let pages = self.tree(slot).into_iter().flat_map(|tree| tree.pages());
        let mut pages: Vec<(u32, PageId)> =
            pages.map(|page| (self.meta(page).depth, page)).collect();
        pages.sort_unstable();
        pages.into_iter().map(|(_, page)| page).collect()
    }

    /// Adds the blocks of a page that a tree owns. `names` are the names of the blocks copied so far, by path hash.
    pub(in crate::kv::index) fn copy_page(
        &self,
        shared: &Shared,
        slot: Slot,
        page: PageId,
        names: &mut FxHashMap<u64, EngineHash>,
        copied: &mut CopiedBlocks,
    ) {
        let Some(tree) = self.tree(slot) else {
            return;
        };
        let meta = self.meta(page);
        let page_names = &self.chunk(page).rows[page as usize % CHUNK].names;
        let (head, body) = shared.pages.get(page);
        let mut before = meta.parent_path;
        let mut follows = false;
        for (offset, name) in page_names.iter().enumerate().take(head.len()) {
            let block = block_id(page, offset);
            let depth = meta.depth + offset as u32;
            let path = body.paths[offset].load(Relaxed);
            let parent_path = std::mem::replace(&mut before, path);
            let residency = self.residency(shared, slot, block);
            if residency == Residency::Absent {
                follows = false;
                continue;
            }
            let parent = match depth {
                0 => Some(Parent::Root(ChainRoot(parent_path))),
                _ => names.get(&parent_path).copied().map(Parent::Block),
            };
            let Some(parent) = parent else {
                copied.orphans += 1;
                follows = false;
                continue;
            };
            let name = tree.alias_of(block).unwrap_or(EngineHash(*name));
            let copies = tree.copies(block, residency).map(|copies| match copies {
                UNKNOWN => TreeBlock::UNKNOWN_COPIES,
                count => u32::from(count),
            });
            let local = PathHash(parent_path).local_before(PathHash(path), depth);
            names.insert(path, name);
            copied.push(
                (!follows).then_some(parent),
                NewBlock { name, local },
                copies,
            );
            follows = true;
        }
    }
}
