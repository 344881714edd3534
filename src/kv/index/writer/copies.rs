//! How many copies of a block a tree has in each tier, and what one event adds.

use crate::kv::event::Tier;
use crate::kv::index::owner_sets::{Residency, Slot};
use crate::kv::index::types::CopyReport;

pub(super) type Copies = [u16; Tier::COUNT];

/// An unknown number of copies, at least one: too many to count, or the block was reported again.
/// Counts as gone when one is removed.
pub(super) const UNKNOWN: u16 = u16::MAX;

/// The copies that a residency alone stands for; other numbers are noted for the tree.
pub(super) fn default_copies(residency: Residency) -> Copies {
    match residency {
        Residency::Absent => [0, 0, 0],
        Residency::Gpu => [1, 0, 0],
        Residency::Cpu => [0, 1, 0],
        Residency::Disk => [0, 0, 1],
    }
}

pub(super) fn residency_of(copies: Copies) -> Residency {
    match copies {
        [0, 0, 0] => Residency::Absent,
        [0, 0, _] => Residency::Disk,
        [0, _, _] => Residency::Cpu,
        _ => Residency::Gpu,
    }
}

/// What one store event says of each of its blocks.
#[derive(Clone, Copy)]
pub(super) struct StoreContext {
    pub(super) slot: Slot,
    pub(super) tier: Tier,
    pub(super) copies: CopyReport,
    /// Copies and residency of a block that the tree did not own before.
    pub(super) initial_copies: Copies,
    pub(super) residency: Residency,
    /// Whether that residency alone stands for those copies.
    pub(super) is_default: bool,
}

impl StoreContext {
    pub(super) fn new(slot: Slot, tier: Tier, copies: CopyReport) -> Self {
        let mut initial_copies = [0; Tier::COUNT];
        initial_copies[tier as usize] = match copies {
            CopyReport::OneMore => 1,
            CopyReport::AtLeastOne => UNKNOWN,
        };
        let residency = residency_of(initial_copies);
        Self {
            slot,
            tier,
            copies,
            initial_copies,
            residency,
            is_default: initial_copies == default_copies(residency),
        }
    }
}
