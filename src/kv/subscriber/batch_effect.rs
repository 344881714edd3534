//! What applying one batch to a tree did.

use crate::kv::event_filter::{IgnoredReason, TreeImpact};

#[derive(Debug, Default)]
pub(super) struct BatchEffect {
    pub(super) events: u64,
    pub(super) stored: u64,
    pub(super) removed: u64,
    /// Removals of blocks that are not in the tree.
    pub(super) unknown_removals: u64,
    /// The worker cleared its whole cache.
    pub(super) cleared: bool,
    pub(super) ignored: Vec<IgnoredReason>,
    /// Of the events since the last clear.
    pub(super) impact: TreeImpact,
}
