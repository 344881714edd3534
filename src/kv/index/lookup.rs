//! Finds how long a prefix of a prompt each tree owns: one walk over the prompt's pages for all trees.

use smallvec::SmallVec;

use super::pages::{Page, PageOwner, Pages, Slot};
use super::types::RankPrefix;
use crate::kv::block::{ChainRoot, LocalHash, PathHash, SEGMENT_BLOCKS};
use crate::kv::event::Tier;

/// A tree that owns all blocks so far.
struct RemainingTree {
    slot: Slot,
    /// The leading blocks that are all in the GPU; [`ALL`] as long as these are all blocks.
    gpu_blocks: u32,
    disk_blocks: u32,
}

/// Pages that are looked for together, so that the processor waits for several cache lines at the same time.
const AT_ONCE: usize = 8;

const ALL: u32 = u32::MAX;

struct Lookup<'a> {
    pages: &'a Pages,
    /// Sorted by slot.
    trees: SmallVec<[RemainingTree; 64]>,
    found: &'a mut Vec<RankPrefix>,
}

impl Pages {
    pub(super) fn overlap(
        &self,
        root: ChainRoot,
        locals: &[LocalHash],
        found: &mut Vec<RankPrefix>,
    ) {
        let mut lookup = Lookup {
            pages: self,
            trees: SmallVec::new(),
            found,
        };
        let mut path = PathHash::start(root);
        let mut depth = 0;
        for segments in locals.chunks(AT_ONCE * SEGMENT_BLOCKS) {
            let mut end = path;
            let of_segment = |segment| {
                let before = end;
                let (first, last) = end.segment(segment);
                end = last;
                (before, segment, last, self.starting_with(first.0, 0))
            };
            let segments = segments.chunks(SEGMENT_BLOCKS).map(of_segment);
            let segments: SmallVec<[_; AT_ONCE]> = segments.collect();
            for (before, segment, last, page) in segments {
                let Some(page) = page.map(|page| self.get(page)) else {
                    lookup.report_all(depth);
                    return;
                };
                if depth == 0 {
                    lookup.start(page);
                }
                // Every block of the segment counts for the path hash of the last one.
                if page.has_path_at(segment.len() - 1, last.0) {
                    lookup.pass(page, segment.len(), depth);
                } else if !lookup.walk(page, before, segment, depth) {
                    return;
                }
                depth += segment.len() as u32;
                if lookup.trees.is_empty() {
                    return;
                }
            }
            path = end;
        }
        lookup.report_all(depth);
    }
}

impl Lookup<'_> {
    /// Starts with the visible owners of the first page.
    fn start(&mut self, page: &Page) {
        let visible = page.owners.iter().filter(|owner| {
            let rank = &self.pages.slots[owner.slot as usize];
            rank.as_ref().is_some_and(|rank| rank.is_visible)
        });
        self.trees.extend(visible.map(|owner| RemainingTree {
            slot: owner.slot,
            gpu_blocks: ALL,
            disk_blocks: 0,
        }));
    }

    /// Goes along a segment block by block, where its blocks lie in several pages: chains fork within it. Returns false
    /// at the end of what the index has of the prompt.
    fn walk(&mut self, first: &Page, before: PathHash, segment: &[LocalHash], depth: u32) -> bool {
        let mut path = before;
        let paths = segment.iter().zip(depth..).map(|(local, depth)| {
            path = path.step(*local, depth);
            path.0
        });
        let paths: SmallVec<[u64; SEGMENT_BLOCKS]> = paths.collect();
        let mut page = first;
        let mut at = 0;
        loop {
            let known = paths[at..].iter().zip(&page.paths[..page.len()]);
            let known = known.take_while(|(path, known)| path == known).count();
            self.pass(page, known, depth + at as u32);
            at += known;
            if at == paths.len() {
                return true;
            }
            let Some(next) = self.pages.starting_with(paths[at], depth + at as u32) else {
                self.report_all(depth + at as u32);
                return false;
            };
            page = self.pages.get(next);
        }
    }

    /// Goes on by the first `blocks` blocks of a page, which are at `depth` of the prompt. Reports the trees that do
    /// not own all of them.
    fn pass(&mut self, page: &Page, blocks: usize, depth: u32) {
        let Self {
            pages,
            trees,
            found,
        } = self;
        let all = u16::MAX >> (SEGMENT_BLOCKS - blocks);
        let mut owners = &page.owners[..];
        // Mostly each tree owns all of the page, and no other tree does.
        let owns_all = |(tree, owner): (&RemainingTree, &PageOwner)| {
            tree.slot == owner.slot && owner.tiers[Tier::Gpu as usize] & all == all
        };
        if trees.len() == owners.len() && trees.iter().zip(owners).all(owns_all) {
            return;
        }
        let mut pass = |tree: &mut RemainingTree| {
            while let [owner, rest @ ..] = owners
                && owner.slot < tree.slot
            {
                owners = rest;
            }
            let owner = owners.first().filter(|owner| owner.slot == tree.slot);
            let tiers = owner.map_or([0; Tier::COUNT], |owner| owner.tiers);
            let [gpu, cpu, disk] = tiers.map(|tier| tier & all);
            if gpu == all {
                return true;
            }
            if tree.gpu_blocks == ALL {
                tree.gpu_blocks = depth + gpu.trailing_ones();
            }
            let passed = (gpu | cpu | disk).trailing_ones();
            let on_disk = u32::from(disk) & ((1 << passed) - 1);
            tree.disk_blocks += on_disk.count_ones();
            let owns_all = passed as usize == blocks;
            if !owns_all && depth + passed > 0 {
                found.extend(prefix_of(pages, tree, depth + passed));
            }
            owns_all
        };
        if let Some(first) = trees.iter_mut().position(|tree| !pass(tree)) {
            let mut kept = first;
            for at in first + 1..trees.len() {
                if pass(&mut trees[at]) {
                    trees.swap(kept, at);
                    kept += 1;
                }
            }
            trees.truncate(kept);
        }
    }

    /// The prompt, or what the index has of it, ends after `depth` blocks.
    fn report_all(&mut self, depth: u32) {
        let Self {
            pages,
            trees,
            found,
        } = self;
        found.extend(
            trees
                .iter()
                .filter_map(|tree| prefix_of(pages, tree, depth)),
        );
    }
}

fn prefix_of(pages: &Pages, tree: &RemainingTree, blocks: u32) -> Option<RankPrefix> {
    let rank = pages.slots[tree.slot as usize].as_ref()?;
    Some(RankPrefix {
        worker: rank.worker,
        rank: rank.rank,
        blocks,
        gpu_blocks: tree.gpu_blocks.min(blocks),
        disk_blocks: tree.disk_blocks,
    })
}
