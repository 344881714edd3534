//! How an engine and a source are made.

/// How the engine and the source are made; fixed for one run.
#[derive(Clone, Copy, Debug)]
pub(in crate::kv::stream::tests) struct Make {
    pub(in crate::kv::stream::tests) can_replay: bool,
    /// Questions are never answered.
    pub(in crate::kv::stream::tests) is_deaf: bool,
    /// Now and then, none is for a while.
    pub(in crate::kv::stream::tests) has_deaf_spells: bool,
    /// Batches kept for replays.
    pub(in crate::kv::stream::tests) kept: u64,
    /// An answer has no more batches than this, and then no end; or all but some, and then no end.
    pub(in crate::kv::stream::tests) answer_max: Option<usize>,
    /// An answer is the start of a new live stream.
    pub(in crate::kv::stream::tests) is_one_stream: bool,
    pub(in crate::kv::stream::tests) has_snapshots: bool,
    pub(in crate::kv::stream::tests) has_epoch: bool,
    /// Half an old answer may come before a new one.
    pub(in crate::kv::stream::tests) is_sloppy: bool,
    /// Other replicas give their trees, asked or not.
    pub(in crate::kv::stream::tests) has_peers: bool,
    /// Of a hundred: batches lost, repeated, swapped, unreadable; answers spoilt.
    pub(in crate::kv::stream::tests) lost: u8,
    pub(in crate::kv::stream::tests) repeated: u8,
    pub(in crate::kv::stream::tests) swapped: u8,
    pub(in crate::kv::stream::tests) unreadable: u8,
    pub(in crate::kv::stream::tests) spoilt: u8,
    pub(in crate::kv::stream::tests) held_max: usize,
    pub(in crate::kv::stream::tests) digests_max: usize,
}
