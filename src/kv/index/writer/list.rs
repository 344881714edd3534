//! Lists a tree's blocks.

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;

use super::Writer;
use super::copies::UNKNOWN;
use crate::kv::event::EngineHash;
use crate::kv::index::owner_sets::{Residency, Slot};
use crate::kv::index::pages::{CHUNK, block_id};
use crate::kv::index::shared::Shared;
use crate::kv::index::types::TreeBlock;

impl Writer {
    /// All blocks that a tree owns, parents before children.
    pub(in crate::kv::index) fn list(&self, shared: &Shared, slot: Slot) -> Vec<TreeBlock> {
        let Some(tree) = self.tree(slot) else {
            return Vec::new();
        };
        let mut listed = Vec::with_capacity(tree.len as usize);
        let mut parents = Vec::with_capacity(tree.len as usize);
        for page in tree.pages() {
            let meta = self.meta(page);
            let names = &self.chunk(page).rows[page as usize % CHUNK].names;
            let (head, body) = shared.pages.get(page);
            for (offset, name) in names.iter().enumerate().take(head.len()) {
                let block = block_id(page, offset);
                let residency = self.residency(shared, slot, block);
                if residency == Residency::Absent {
                    continue;
                }
                let copies = tree.copies(block, residency);
                listed.push(TreeBlock {
                    name: tree.alias_of(block).unwrap_or(EngineHash(*name)),
                    parent: None,
                    path: body.paths[offset].load(Relaxed),
                    depth: meta.depth + offset as u32,
                    copies: copies.map(|copies| match copies {
                        UNKNOWN => TreeBlock::UNKNOWN_COPIES,
                        count => u32::from(count),
                    }),
                });
                parents.push(match offset {
                    0 => meta.parent_path,
                    offset => body.paths[offset - 1].load(Relaxed),
                });
            }
        }
        let names: HashMap<u64, EngineHash> = listed
            .iter()
            .map(|block| (block.path, block.name))
            .collect();
        for (block, parent) in listed.iter_mut().zip(parents) {
            if block.depth > 0 {
                block.parent = names.get(&parent).copied();
            }
        }
        listed.sort_unstable_by_key(|block| (block.depth, block.path));
        listed
    }
}
