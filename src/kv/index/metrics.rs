//! Size of all indexes together, and the warning at their memory limit.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use tracing::warn;

use crate::ids::Model;
use crate::kv::block::BlockShape;
use crate::observe::metrics::metric_table;

pub type IndexKey = (Model, BlockShape);

metric_table! {
    #[derive(Clone, Debug)]
    pub(in crate::kv) struct Metrics {
        blocks: gauge "warmroute_kv_index_blocks" "Distinct blocks that workers reported as cached.",
        pub(in crate::kv) bytes: gauge "warmroute_kv_index_bytes" "Memory of the indexes over reported blocks.",
        dropped: counter "warmroute_kv_index_dropped_blocks_total"
            "Reported blocks that were forgotten, or not stored, because of the memory limit.",
    } and {
        /// The next warning is due at this many dropped blocks.
        next_warning: Arc<AtomicU64>,
    }
}

impl Metrics {
    #[inline]
    pub(super) fn update_blocks(&self, before: u64, after: u64) {
        if after != before {
            self.blocks.add(after as i64 - before as i64);
        }
    }

    pub(super) fn count_dropped(&self, blocks: u64, key: &IndexKey) {
        self.dropped.inc_by(blocks);
        // Warn at the first, and then whenever the count has doubled: at the limit, every event drops some.
        let dropped = self.dropped.get();
        if dropped < self.next_warning.load(Relaxed) {
            return;
        }
        self.next_warning.store(dropped * 2, Relaxed);
        warn!(
            model = &*key.0,
            block_size = key.1.size,
            dropped_blocks = dropped,
            fix = "raise the memory limit of the KV index",
            "KV index is at its memory limit; dropping the blocks that were stored longest ago, ends of \
             chains first"
        );
    }
}
