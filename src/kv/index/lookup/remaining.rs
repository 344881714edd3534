//! The trees that own every block of a prompt so far, and in which tier, while a lookup goes along the
//! prompt. A tree is the set of cached blocks of one dp rank; it owns the blocks that are cached there. Each
//! tree is reported once, where its prefix ends.

use smallvec::SmallVec;

use crate::kv::index::members::{Members, TreeBits};
use crate::kv::index::owner_sets::{Slot, TREES_PER_WORD};
use crate::kv::index::tree_slots::{SlotsSnapshot, TreeSlots};
use crate::kv::index::types::RankPrefix;

pub(super) struct RemainingTrees<'a> {
    slots: &'a TreeSlots,
    snapshot: SlotsSnapshot,
    /// Trees that own all blocks so far, each in whatever tier.
    any: TreeBits,
    /// Trees of `any` that have all these blocks in the GPU.
    gpu: TreeBits,
    /// Trees of `any` that have the last block on disk only. The vector has no words until there is such a tree.
    disk: TreeBits,
    /// The trees of `any` that are not in `gpu`.
    low: SmallVec<[LowTree; 4]>,
    /// The results.
    found: &'a mut Vec<RankPrefix>,
}

/// A tree that has at least one of the blocks only in a lower tier than the GPU.
struct LowTree {
    slot: Slot,
    /// Leading blocks that are all in the GPU.
    gpu_blocks: u32,
    /// Number of blocks on disk only. The depth where a run of such blocks starts is subtracted, and the depth
    /// where it ends is added, with wrapping: the number is right once the last run has ended.
    disk_blocks: u32,
}

impl<'a> RemainingTrees<'a> {
    /// Considers the trees that exist now; trees added later are left out.
    pub(super) fn new(slots: &'a TreeSlots, found: &'a mut Vec<RankPrefix>) -> Self {
        Self {
            slots,
            snapshot: slots.snapshot(),
            any: TreeBits::new(),
            gpu: TreeBits::new(),
            disk: TreeBits::new(),
            low: SmallVec::new(),
            found,
        }
    }

    /// Number of groups. A group is the [`TREES_PER_WORD`] trees that share a word of the bitmaps.
    #[inline]
    pub(super) fn groups(&self) -> usize {
        self.snapshot.groups
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.any.iter().all(|group| *group == 0)
    }

    /// Starts with the owners of the first block.
    pub(super) fn start(&mut self, owners: &Members) {
        self.any.extend_from_slice(&owners.gpu);
        self.gpu.extend_from_slice(&owners.gpu);
        if owners.has_low {
            for group in 0..self.snapshot.groups {
                let low = owners.low[group];
                self.any[group] |= low;
                self.low.extend(slots_of(group, low).map(|slot| LowTree {
                    slot,
                    gpu_blocks: 0,
                    disk_blocks: 0,
                }));
            }
        }
        if owners.has_disk {
            self.disk.extend_from_slice(&owners.disk);
        }
    }

    /// Whether [`Self::retain`] with these owners would remove a tree, or change a tree's tier.
    #[inline]
    pub(super) fn would_change(&self, owners: &Members) -> bool {
        let gpu = self.gpu.iter().zip(&owners.gpu);
        let lost_gpu = gpu.fold(0, |lost, (gpu, owners)| lost | (gpu & !owners));
        if !owners.has_low && self.low.is_empty() {
            return lost_gpu != 0;
        }
        let any = self.any.iter().enumerate();
        let lost = any.fold(0, |lost, (group, any)| {
            let disk = owners.disk(group) & any;
            lost | (any & !(owners.gpu[group] | owners.low[group]))
                | (disk ^ self.disk.get(group).copied().unwrap_or(0))
        });
        (lost_gpu | lost) != 0
    }

    /// Keeps the trees that own the block at `depth`, and reports the others.
    pub(super) fn retain(&mut self, owners: &Members, depth: u32) {
        for group in 0..self.snapshot.groups {
            let gpu = owners.gpu[group];
            let low = if owners.has_low { owners.low[group] } else { 0 };
            let no_longer_gpu = self.gpu[group] & !gpu;
            self.gpu[group] &= gpu;
            let removed = self.any[group] & !(gpu | low);
            self.any[group] &= gpu | low;
            for slot in slots_of(group, no_longer_gpu & !removed) {
                self.low.push(LowTree {
                    slot,
                    gpu_blocks: depth,
                    disk_blocks: 0,
                });
            }
            if owners.has_disk || !self.disk.is_empty() {
                self.update_disk(group, owners.disk(group), depth);
            }
            if removed != 0 {
                self.report(group, removed, depth);
            }
        }
    }

    /// Notes for which trees of a group a run of disk-only blocks starts or ends at `depth`. `on_disk`: the owners
    /// that have the block at `depth` on disk only.
    #[inline(never)]
    fn update_disk(&mut self, group: usize, on_disk: u64, depth: u32) {
        self.disk.resize(self.any.len(), 0);
        let on_disk = on_disk & self.any[group];
        let before = std::mem::replace(&mut self.disk[group], on_disk);
        for slot in slots_of(group, on_disk ^ before) {
            let bit = 1 << (slot as usize % TREES_PER_WORD);
            if let Some(tree) = self.low.iter_mut().find(|tree| tree.slot == slot) {
                tree.disk_blocks = match on_disk & bit {
                    0 => tree.disk_blocks.wrapping_add(depth),
                    _ => tree.disk_blocks.wrapping_sub(depth),
                };
            }
        }
    }

    /// Reports all remaining trees: the prompt ends after `depth` blocks.
    pub(super) fn report_all(&mut self, depth: u32) {
        for group in 0..self.disk.len() {
            self.update_disk(group, 0, depth);
        }
        for group in 0..self.any.len() {
            self.report(group, self.any[group], depth);
        }
    }

    /// Reports some trees of a group (a bit for each) with a prefix of `blocks` blocks.
    #[inline]
    fn report(&mut self, group: usize, trees: u64, blocks: u32) {
        let Self { found, low, .. } = self;
        self.slots
            .for_each(self.snapshot, group, trees, |slot, worker, rank| {
                let low_tree = low.iter().find(|tree| tree.slot == slot);
                found.push(RankPrefix {
                    worker,
                    rank,
                    blocks,
                    gpu_blocks: low_tree.map_or(blocks, |tree| tree.gpu_blocks),
                    disk_blocks: low_tree.map_or(0, |tree| tree.disk_blocks),
                });
            });
    }
}

/// The slots of trees of a group (a bit for each).
fn slots_of(group: usize, mut trees: u64) -> impl Iterator<Item = Slot> {
    std::iter::from_fn(move || {
        let position = (trees != 0).then(|| trees.trailing_zeros())?;
        trees &= trees - 1;
        Some((group * TREES_PER_WORD) as Slot + position)
    })
}
