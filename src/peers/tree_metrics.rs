//! Metrics of the trees that replicas copy from each other.

use crate::observe::metrics::metric_table;

/// From a small tree beside this replica to a large one over a slow network.
const SECONDS: &[f64] = &[0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 20.0, 60.0];

metric_table! {
    #[derive(Clone, Debug)]
    pub struct TreeMetrics {
        pub(super) taken: counters "warmroute_peer_trees_total" ["outcome"]
            "Trees of cached blocks that were asked of other replicas, by outcome: taken (the engine confirmed it), \
             not_confirmed (the engine did not), other reasons why a tree was not taken over, or why a replica gave none.",
        pub(super) given: counters "warmroute_peer_trees_given_total" ["outcome"]
            "Requests of other replicas for trees of cached blocks, by outcome: given, predicted (all predicted blocks), cold, \
             unknown_rank, busy, or failed (the other replica stopped reading).",
        pub(super) blocks: counter "warmroute_peer_tree_blocks_total"
            "Blocks of other replicas' trees that were taken over.",
        pub(super) predicted_blocks: counter "warmroute_peer_predicted_blocks_total"
            "Predicted blocks that were taken over from another replica.",
        pub(super) bytes: counter "warmroute_peer_tree_bytes_total" "Size of the trees that other replicas sent.",
        pub(super) seconds: histogram "warmroute_peer_tree_seconds" in SECONDS
            "Time to copy one tree from another replica, without waiting for its turn.",
    }
}
