//! Lists a tree's blocks page by page.

use std::sync::atomic::Ordering::Relaxed;

use rustc_hash::FxHashMap;

use super::Writer;
use super::copies::UNKNOWN;
use crate::kv::event::EngineHash;
use crate::kv::index::owner_sets::{Residency, Slot};
use crate::kv::index::pages::{CHUNK, PageId, block_id};
use crate::kv::index::shared::Shared;
use crate::kv::index::types::TreeBlock;

/// The blocks listed so far, each with the path hash before it.
#[derive(Debug, Default)]
pub(in crate::kv::index) struct Listing(Vec<(TreeBlock, u64)>);

impl Listing {
    /// Parents before children.
    pub(in crate::kv::index) fn finish(self) -> Vec<TreeBlock> {
        let Listing(mut listed) = self;
        listed.sort_unstable_by_key(|(block, _)| (block.depth, block.path));
        // A block that passed to another page while others were listed may be there twice.
        listed.dedup_by_key(|(block, _)| block.path);
        let names: FxHashMap<u64, EngineHash> = listed
            .iter()
            .map(|(block, _)| (block.path, block.name))
            .collect();
        let with_parent = |(block, before): (TreeBlock, u64)| TreeBlock {
            parent: match block.depth {
                0 => None,
                _ => names.get(&before).copied(),
            },
            ..block
        };
        listed.into_iter().map(with_parent).collect()
    }
}

impl Writer {
    pub(in crate::kv::index) fn pages_of(&self, slot: Slot) -> Vec<PageId> {
        let pages = self.tree(slot).into_iter().flat_map(|tree| tree.pages());
        pages.collect()
    }

    /// Adds the blocks of a page that a tree owns.
    pub(in crate::kv::index) fn list_page(
        &self,
        shared: &Shared,
        slot: Slot,
        page: PageId,
        Listing(listed): &mut Listing,
    ) {
        let Some(tree) = self.tree(slot) else {
            return;
        };
        let meta = self.meta(page);
        let names = &self.chunk(page).rows[page as usize % CHUNK].names;
        let (head, body) = shared.pages.get(page);
        let mut before = meta.parent_path;
        for (offset, name) in names.iter().enumerate().take(head.len()) {
            let path = body.paths[offset].load(Relaxed);
            let parent_path = std::mem::replace(&mut before, path);
            let block = block_id(page, offset);
            let residency = self.residency(shared, slot, block);
            if residency == Residency::Absent {
                continue;
            }
            let copies = tree.copies(block, residency);
            let listed_block = TreeBlock {
                name: tree.alias_of(block).unwrap_or(EngineHash(*name)),
                parent: None,
                path,
                depth: meta.depth + offset as u32,
                copies: copies.map(|copies| match copies {
                    UNKNOWN => TreeBlock::UNKNOWN_COPIES,
                    count => u32::from(count),
                }),
            };
            listed.push((listed_block, parent_path));
        }
    }
}
