//! Lists a tree's blocks page by page, and copies them for another replica.

use rustc_hash::FxHashMap;

use super::Writer;
use super::tree_state::listed;
use crate::kv::block::{ChainRoot, PathHash};
use crate::kv::event::{EngineHash, Tier};
use crate::kv::index::pages::{BlockId, PageId, Pages, Slot};
use crate::kv::index::types::{CopiedBlocks, NewBlock, Parent, TreeBlock};

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

struct OwnedBlock {
    /// The path hash before it.
    before: u64,
    path: u64,
    depth: u32,
    name: EngineHash,
    copies: [u32; Tier::COUNT],
}

impl Writer {
    pub(in crate::kv::index) fn pages_of(&self, slot: Slot) -> Vec<PageId> {
        self.tree(slot).pages.iter().copied().collect()
    }

    /// The pages of a tree, those that are nearer to the start of their chains first: every block comes after the
    /// one before it.
    pub(in crate::kv::index) fn pages_by_depth(&self, pages: &Pages, slot: Slot) -> Vec<PageId> {
        let mut of_tree = self.pages_of(slot);
        of_tree.sort_unstable_by_key(|page| (pages.get(*page).depth, *page));
        of_tree
    }

    /// The blocks of a page that a tree owns; none of a page that was removed since.
    fn blocks_in(&self, pages: &Pages, slot: Slot, id: PageId) -> impl Iterator<Item = OwnedBlock> {
        let tree = self.tree(slot);
        let page = pages.find(id).into_iter();
        page.flat_map(move |page| {
            (0..page.len()).filter_map(move |offset| {
                let residency = page.residency(slot, offset)?;
                let block = BlockId::new(id, offset);
                Some(OwnedBlock {
                    before: match offset {
                        0 => page.parent_path,
                        _ => page.paths[offset - 1],
                    },
                    path: page.paths[offset],
                    depth: page.depth + offset as u32,
                    name: Self::name_of(pages, tree, block)?,
                    copies: listed(tree.copies(block, Some(residency))),
                })
            })
        })
    }

    /// Adds the blocks of a page that a tree owns.
    pub(in crate::kv::index) fn list_page(
        &self,
        pages: &Pages,
        slot: Slot,
        page: PageId,
        Listing(listed): &mut Listing,
    ) {
        let blocks = self.blocks_in(pages, slot, page);
        listed.extend(blocks.map(|block| {
            let of_tree = TreeBlock {
                name: block.name,
                parent: None,
                path: block.path,
                depth: block.depth,
                copies: block.copies,
            };
            (of_tree, block.before)
        }));
    }

    /// Adds the blocks of a page that a tree owns. `names` are the names of the blocks copied so far, by path hash.
    pub(in crate::kv::index) fn copy_page(
        &self,
        pages: &Pages,
        slot: Slot,
        page: PageId,
        names: &mut FxHashMap<u64, EngineHash>,
        copied: &mut CopiedBlocks,
    ) {
        // The path hash of the block that was copied last.
        let mut last = None;
        for block in self.blocks_in(pages, slot, page) {
            let parent = match block.depth {
                0 => Some(Parent::Root(ChainRoot(block.before))),
                _ => names.get(&block.before).copied().map(Parent::Block),
            };
            let Some(parent) = parent else {
                copied.orphans += 1;
                continue;
            };
            let local = PathHash(block.before).local_before(PathHash(block.path), block.depth);
            names.insert(block.path, block.name);
            copied.push(
                (last != Some(block.before)).then_some(parent),
                NewBlock {
                    name: block.name,
                    local,
                },
                block.copies,
            );
            last = Some(block.path);
        }
    }
}
