//! What decides whether a prefill and a decode worker are a pair.

use std::sync::Arc;

/// The properties that the workers of a pair must share, except for the model. Made once per snapshot and
/// compared for each pair that a routing decision considers.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct CompatibilityKey {
    pub(in crate::fleet) block_size: Option<u32>,
    pub(in crate::fleet) version: Option<Arc<str>>,
    /// The value of the topology label. Workers without the label are in one zone.
    pub(in crate::fleet) zone: Option<Arc<str>>,
}

impl CompatibilityKey {
    /// True if no difference is known. A block size or version that an engine did not report rules nothing out.
    pub fn is_compatible(&self, other: &Self) -> bool {
        equal_if_known(&self.block_size, &other.block_size)
            && equal_if_known(&self.version, &other.version)
            && self.zone == other.zone
    }
}

fn equal_if_known<T: PartialEq>(left: &Option<T>, right: &Option<T>) -> bool {
    left.is_none() || right.is_none() || left == right
}
