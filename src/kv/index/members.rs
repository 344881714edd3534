//! The trees of an owner set as bitmaps, one for each tier. One instance is reused along a lookup.

use smallvec::SmallVec;

/// A bit for each tree, 48 to a word. Room for 528 trees without an allocation.
pub(super) type TreeBits = SmallVec<[u64; 11]>;

/// The word's tier number of disk-only trees, as [`super::owner_sets`] encodes it.
pub(super) const DISK_PLANE: u64 = 2;

#[derive(Debug, Default)]
pub(super) struct Members {
    pub(super) gpu: TreeBits,
    /// In a lower tier only, and those of them that have the block on disk only.
    pub(super) low: TreeBits,
    pub(super) disk: TreeBits,
    pub(super) has_low: bool,
    pub(super) has_disk: bool,
}

impl Members {
    /// Empties it, with room for this many groups; trees of later groups will be left out.
    #[inline]
    pub(super) fn reset(&mut self, groups: usize) {
        self.gpu.clear();
        self.gpu.resize(groups, 0);
        if self.has_low || self.low.len() != groups {
            self.low.clear();
            self.low.resize(groups, 0);
        }
        self.has_low = false;
        if self.has_disk {
            self.disk.clear();
            self.has_disk = false;
        }
    }

    #[inline]
    pub(super) fn add(&mut self, group: u64, trees: u64, plane: u64) {
        if plane != 0 {
            self.add_low(group, trees, plane);
        } else if let Some(gpu) = self.gpu.get_mut(group as usize) {
            *gpu |= trees;
        }
    }

    #[inline(never)]
    fn add_low(&mut self, group: u64, trees: u64, plane: u64) {
        self.has_low = true;
        if let Some(low) = self.low.get_mut(group as usize) {
            *low |= trees;
        }
        if plane == DISK_PLANE {
            self.has_disk = true;
            self.disk.resize(self.low.len(), 0);
            if let Some(disk) = self.disk.get_mut(group as usize) {
                *disk |= trees;
            }
        }
    }

    /// The trees of a group that have the block on disk only.
    #[inline]
    pub(super) fn disk(&self, group: usize) -> u64 {
        if self.has_disk { self.disk[group] } else { 0 }
    }
}
