//! How many copies of a block a tree has in each tier.

use crate::kv::event::Tier;
use crate::kv::index::types::TreeBlock;

pub(super) type Copies = [u16; Tier::COUNT];

/// An unknown number of copies, at least one: too many to count, or the block was reported again.
/// Counts as gone when one is removed.
pub(super) const UNKNOWN: u16 = u16::MAX;

/// The copies that a residency (the fastest tier with a copy) alone stands for; other numbers are noted for the tree.
pub(super) fn default_copies(residency: Option<Tier>) -> Copies {
    let mut copies = [0; Tier::COUNT];
    if let Some(tier) = residency {
        copies[tier as usize] = 1;
    }
    copies
}

pub(super) fn residency_of(copies: Copies) -> Option<Tier> {
    let has_copy = |tier: &Tier| copies[*tier as usize] > 0;
    Tier::ALL.into_iter().find(has_copy)
}

/// The copies as a listing has them.
pub(super) fn listed(copies: Copies) -> [u32; Tier::COUNT] {
    copies.map(|copies| match copies {
        UNKNOWN => TreeBlock::UNKNOWN_COPIES,
        count => count.into(),
    })
}
