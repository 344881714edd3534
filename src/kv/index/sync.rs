//! The atomics that lookups and the writer share, and how much of what they share is made at once. The models in
//! `tests/loom` compile the index with another file in place of this one, with atomics whose every interleaving is run.

pub(super) use std::hint::spin_loop;
pub(super) use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, fence};

/// How often a lookup reads a page again that the writer is changing. A change is a few stores, unless the writer's thread
/// was suspended among them; then the page's blocks are missed.
pub(super) const MAX_TRIES: usize = 64;

/// Pages that are allocated at once.
pub(super) const PAGES_AT_ONCE: usize = 1024;

/// Owner sets in the first piece of a size class.
pub(super) const SETS_AT_ONCE: u32 = 64;

/// The system gives memory for large slices only as they are written.
pub(super) fn zeroed(words: usize) -> Box<[AtomicU64]> {
    bytemuck::zeroed_slice_box(words)
}
