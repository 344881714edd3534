//! Loom itself comes between at each atomic operation.

pub(super) fn race_point() {}
