//! Loom's atomics, and few of everything: each execution makes all of them anew.

pub(super) use loom::hint::spin_loop;
pub(super) use loom::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, fence};

/// Between two tries the writer runs on, so a lookup needs few.
pub(super) const MAX_TRIES: usize = 8;

pub(super) const PAGES_AT_ONCE: usize = 4;

pub(super) const SETS_AT_ONCE: u32 = 2;

pub(super) fn zeroed(words: usize) -> Box<[AtomicU64]> {
    (0..words).map(|_| AtomicU64::new(0)).collect()
}
