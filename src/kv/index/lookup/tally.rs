//! Which trees still hold a prompt, and in what tier, as its blocks go by.

use smallvec::SmallVec;

use crate::kv::index::Depth;
use crate::kv::index::holders::{GROUP, Groups, Members, Slot};
use crate::kv::index::roster::{Roll, Roster};

pub(super) struct Tally<'a> {
    roster: &'a Roster,
    roll: Roll,
    /// Trees that hold all blocks so far, and those of them that have all in the GPU.
    any: Groups,
    gpu: Groups,
    /// Those that have the last block on disk only; empty while nobody has.
    disk: Groups,
    /// Trees that do not have all in the GPU.
    lower: SmallVec<[Lower; 4]>,
    found: &'a mut Vec<Depth>,
}

/// A tree that does not have all in the GPU.
struct Lower {
    slot: Slot,
    gpu_blocks: u32,
    /// Blocks on disk only. While the last one is, less where they began: where they end is added.
    disk_blocks: u32,
}

impl<'a> Tally<'a> {
    /// Of trees that were planted until now.
    pub(super) fn new(roster: &'a Roster, found: &'a mut Vec<Depth>) -> Self {
        Self {
            roster,
            roll: roster.call(),
            any: Groups::new(),
            gpu: Groups::new(),
            disk: Groups::new(),
            lower: SmallVec::new(),
            found,
        }
    }

    /// How many groups of trees there may be.
    #[inline]
    pub(super) fn groups(&self) -> usize {
        self.roll.groups
    }

    /// Whether nobody is left.
    #[inline]
    pub(super) fn is_over(&self) -> bool {
        self.any.iter().all(|group| *group == 0)
    }

    /// Begins with the holders of the first block.
    pub(super) fn begin(&mut self, members: &Members) {
        self.any.extend_from_slice(&members.gpu);
        self.gpu.extend_from_slice(&members.gpu);
        if members.has_low {
            for group in 0..self.roll.groups {
                let low = members.low[group];
                self.any[group] |= low;
                self.lower.extend(bits(group, low).map(|slot| Lower {
                    slot,
                    gpu_blocks: 0,
                    disk_blocks: 0,
                }));
            }
        }
        if members.has_disk {
            self.disk.extend_from_slice(&members.disk);
        }
    }

    /// Whether `members` would take anybody out, or say another tier of anybody.
    #[inline]
    pub(super) fn loses(&self, members: &Members) -> bool {
        let gpu = self.gpu.iter().zip(&members.gpu);
        let lost = gpu.fold(0, |lost, (gpu, held)| lost | (gpu & !held));
        if !members.has_low && self.lower.is_empty() {
            return lost != 0;
        }
        let any = self.any.iter().enumerate();
        let lost_at_all = any.fold(0, |lost, (group, any)| {
            let disk = members.disk(group) & any;
            lost | (any & !(members.gpu[group] | members.low[group]))
                | (disk ^ self.disk.get(group).copied().unwrap_or(0))
        });
        (lost | lost_at_all) != 0
    }

    /// Reports the trees that are not among `members`.
    pub(super) fn narrow(&mut self, members: &Members, depth: u32) {
        for group in 0..self.roll.groups {
            let gpu = members.gpu[group];
            let low = match members.has_low {
                true => members.low[group],
                false => 0,
            };
            let from_gpu = self.gpu[group] & !gpu;
            self.gpu[group] &= gpu;
            let gone = self.any[group] & !(gpu | low);
            self.any[group] &= gpu | low;
            for slot in bits(group, from_gpu & !gone) {
                self.lower.push(Lower {
                    slot,
                    gpu_blocks: depth,
                    disk_blocks: 0,
                });
            }
            if members.has_disk || !self.disk.is_empty() {
                self.narrow_disk(group, members.disk(group), depth);
            }
            if gone != 0 {
                self.report(group, gone, depth);
            }
        }
    }

    /// Counts from where on trees have a prompt's blocks on disk only, and up to where.
    #[inline(never)]
    fn narrow_disk(&mut self, group: usize, now: u64, depth: u32) {
        self.disk.resize(self.any.len(), 0);
        let now = now & self.any[group];
        let before = std::mem::replace(&mut self.disk[group], now);
        for slot in bits(group, now ^ before) {
            let bit = 1 << (slot as usize % GROUP);
            if let Some(lower) = self.lower.iter_mut().find(|lower| lower.slot == slot) {
                lower.disk_blocks = match now & bit {
                    0 => lower.disk_blocks.wrapping_add(depth),
                    _ => lower.disk_blocks.wrapping_sub(depth),
                };
            }
        }
    }

    /// Reports all who are left.
    pub(super) fn end(&mut self, depth: u32) {
        for group in 0..self.disk.len() {
            self.narrow_disk(group, 0, depth);
        }
        for group in 0..self.any.len() {
            self.report(group, self.any[group], depth);
        }
    }

    /// Reports that trees of a group hold so many blocks.
    #[inline]
    fn report(&mut self, group: usize, trees: u64, blocks: u32) {
        let Self { found, lower, .. } = self;
        self.roster
            .who(self.roll, group, trees, |slot, worker, rank| {
                let lower = lower.iter().find(|lower| lower.slot == slot);
                found.push(Depth {
                    worker,
                    rank,
                    blocks,
                    gpu_blocks: lower.map_or(blocks, |lower| lower.gpu_blocks),
                    disk_blocks: lower.map_or(0, |lower| lower.disk_blocks),
                });
            });
    }
}

fn bits(group: usize, mut bits: u64) -> impl Iterator<Item = Slot> {
    std::iter::from_fn(move || {
        let bit = (bits != 0).then(|| bits.trailing_zeros())?;
        bits &= bits - 1;
        Some((group * GROUP) as Slot + bit)
    })
}
