//! The plainest model of a tree: a map whose key for a block is the list of all content up to it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::kv::block::{ChainRoot, LocalHash, PathHash};
use crate::kv::event::{EngineHash, Tier};
use crate::kv::index::{CopyReport, NewBlock, Parent, TreeBlock, UnknownParent};

/// A root and the local hashes from there on.
pub(super) type Content = Arc<[u64]>;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Count {
    Known(u32),
    /// At least one.
    Some,
}

#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) name: EngineHash,
    pub(super) copies: [Count; Tier::COUNT],
}

#[derive(Clone, Debug, Default)]
pub(super) struct Model {
    pub(super) blocks: HashMap<Content, Block>,
    names: HashMap<EngineHash, Content>,
    /// Copies in a lower tier that were left out because the GPU has their blocks under other names.
    misnamed: usize,
}

impl Model {
    pub(super) fn store(
        &mut self,
        after: Parent,
        blocks: &[NewBlock],
        tier: Tier,
        report: CopyReport,
    ) -> Result<(), UnknownParent> {
        let mut content = self.content(after).ok_or(UnknownParent)?;
        for block in blocks {
            self.store_one(&mut content, block, tier, report);
        }
        Ok(())
    }

    fn content(&self, after: Parent) -> Option<Vec<u64>> {
        match after {
            Parent::Root(root) => Some(vec![root.0]),
            Parent::Block(name) => self.names.get(&name).map(|content| content.to_vec()),
        }
    }

    /// Stores a block after `content`, which then includes it.
    fn store_one(
        &mut self,
        content: &mut Vec<u64>,
        block: &NewBlock,
        tier: Tier,
        report: CopyReport,
    ) {
        content.push(block.local.0);
        let content: Content = content.as_slice().into();
        if tier != Tier::Gpu
            && let Some(known) = self.blocks.get(&content)
            && known.name != block.name
            && known.copies[Tier::Gpu as usize] != Count::Known(0)
        {
            self.misnamed += 1;
            return;
        }
        if let Some(other) = self.names.get(&block.name).cloned()
            && other != content
        {
            self.forget(&other);
        }
        let known = self.blocks.entry(content.clone()).or_insert(Block {
            name: block.name,
            copies: [Count::Known(0); 3],
        });
        let copies = &mut known.copies[tier as usize];
        *copies = match (*copies, report) {
            (Count::Known(known), CopyReport::OneMore) => Count::Known(known + 1),
            (Count::Known(0), CopyReport::AtLeastOne) => Count::Some,
            (known, _) => known,
        };
        if known.name != block.name {
            let old = std::mem::replace(&mut known.name, block.name);
            let of_tier = known.copies[tier as usize];
            known.copies = [Count::Known(0); 3];
            known.copies[tier as usize] = match of_tier {
                Count::Known(1) => Count::Known(1),
                _ => Count::Some,
            };
            self.names.remove(&old);
        }
        self.names.insert(block.name, content);
    }

    /// As [`Self::store`], but a known name is one more copy of its block.
    pub(super) fn store_lower(
        &mut self,
        after: Parent,
        blocks: &[NewBlock],
        tier: Tier,
        report: CopyReport,
    ) -> usize {
        let mut after = after;
        let mut unplaced = 0;
        self.misnamed = 0;
        // Where the last block is, while those before it were unknown too.
        let mut end = None;
        let mut run = HashSet::new();
        for block in blocks {
            if self.add_copies(&[block.name], tier, report) == 0 {
                (end, run) = (None, HashSet::new());
            } else {
                if !run.insert(block.name) {
                    (end, run) = (None, HashSet::from([block.name]));
                }
                end = end.or_else(|| self.content(after));
                match &mut end {
                    Some(content) => self.store_one(content, block, tier, report),
                    None => unplaced += 1,
                }
            }
            after = Parent::Block(block.name);
        }
        unplaced + self.misnamed
    }

    pub(super) fn add_copies(
        &mut self,
        names: &[EngineHash],
        tier: Tier,
        report: CopyReport,
    ) -> usize {
        let mut unknown = 0;
        for name in names {
            let Some(content) = self.names.get(name) else {
                unknown += 1;
                continue;
            };
            let copies = &mut self.blocks.get_mut(content).unwrap().copies[tier as usize];
            *copies = match (*copies, report) {
                (Count::Known(known), CopyReport::OneMore) => Count::Known(known + 1),
                (Count::Known(0), CopyReport::AtLeastOne) => Count::Some,
                (known, _) => known,
            };
        }
        unknown
    }

    pub(super) fn count_copy_to_remove(&mut self, name: EngineHash, tier: Tier) -> bool {
        let Some(content) = self.names.get(&name) else {
            return false;
        };
        let copies = &mut self.blocks.get_mut(content).unwrap().copies[tier as usize];
        if *copies == Count::Some {
            *copies = Count::Known(1);
        }
        *copies != Count::Known(0)
    }

    pub(super) fn remove(&mut self, names: &[EngineHash], tier: Tier) -> usize {
        let mut missing = 0;
        for name in names {
            let Some(content) = self.names.get(name).cloned() else {
                missing += 1;
                continue;
            };
            let block = self.blocks.get_mut(&content).unwrap();
            let copies = &mut block.copies[tier as usize];
            *copies = match *copies {
                Count::Known(0) => {
                    missing += 1;
                    continue;
                }
                Count::Known(known) => Count::Known(known - 1),
                Count::Some => Count::Known(0),
            };
            if block.copies == [Count::Known(0); 3] {
                self.forget(&content);
            }
        }
        missing
    }

    pub(super) fn forget(&mut self, content: &[u64]) {
        if let Some(block) = self.blocks.remove(content) {
            self.names.remove(&block.name);
        }
    }

    /// Blocks from a prompt's start in any tier, in the GPU, and of the rest those on disk only.
    pub(super) fn depth(&self, root: ChainRoot, locals: &[LocalHash]) -> (u32, u32, u32) {
        let (mut any, mut gpu, mut disk) = (0, None, 0);
        let mut content = vec![root.0];
        for local in locals {
            content.push(local.0);
            let Some(block) = self.blocks.get(content.as_slice()) else {
                break;
            };
            if block.copies[Tier::Gpu as usize] == Count::Known(0) {
                gpu.get_or_insert(any);
            }
            let is_in = |tier: Tier| block.copies[tier as usize] != Count::Known(0);
            disk += u32::from(!is_in(Tier::Gpu) && !is_in(Tier::Cpu));
            any += 1;
        }
        (any, gpu.unwrap_or(any), disk)
    }

    pub(super) fn in_tiers(&self) -> [u64; Tier::COUNT] {
        Tier::ALL.map(|tier| {
            let blocks = self.blocks.values();
            blocks
                .filter(|block| block.copies[tier as usize] != Count::Known(0))
                .count() as u64
        })
    }

    pub(super) fn list(&self) -> Vec<TreeBlock> {
        let listed = self.blocks.iter().map(|(content, block)| TreeBlock {
            name: block.name,
            parent: self
                .blocks
                .get(&content[..content.len() - 1])
                .map(|parent| parent.name),
            path: path_of(content),
            depth: content.len() as u32 - 2,
            copies: block.copies.map(|copies| match copies {
                Count::Known(known) => known,
                Count::Some => TreeBlock::UNKNOWN_COPIES,
            }),
        });
        let mut listed: Vec<TreeBlock> = listed.collect();
        listed.sort_by_key(|block| (block.depth, block.path));
        listed
    }
}

pub(super) fn path_of(content: &[u64]) -> u64 {
    let start = PathHash::start(ChainRoot(content[0]));
    let locals = content[1..].iter().zip(0..);
    let end = locals.fold(start, |path, (local, depth)| {
        path.step(LocalHash(*local), depth)
    });
    end.0
}
