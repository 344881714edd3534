//! Metrics of the trees that replicas copy from each other.

use prometheus::{Histogram, IntCounter, IntCounterVec};

use crate::observe::metrics::Registry;

/// From a small tree beside this replica to a large one over a slow network.
const SECONDS: &[f64] = &[0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 20.0, 60.0];

#[derive(Clone, Debug)]
pub struct TreeMetrics {
    pub(super) taken: IntCounterVec,
    pub(super) given: IntCounterVec,
    pub(super) blocks: IntCounter,
    pub(super) predicted_blocks: IntCounter,
    pub(super) bytes: IntCounter,
    pub(super) seconds: Histogram,
}

impl TreeMetrics {
    pub fn new(registry: &Registry) -> Self {
        Self {
            taken: registry.counters(
                "warmroute_peer_trees_total",
                "Trees of cached blocks that were asked of other replicas, by outcome: taken (the engine confirmed it), \
                 not_confirmed (the engine did not), other reasons why a tree was not taken over, or why a replica \
                 gave none.",
                &["outcome"],
            ),
            given: registry.counters(
                "warmroute_peer_trees_given_total",
                "Requests of other replicas for trees of cached blocks, by outcome: given, predicted (all predicted \
                 blocks), cold, unknown_rank, busy, or failed (the other replica stopped reading).",
                &["outcome"],
            ),
            blocks: registry.counter(
                "warmroute_peer_tree_blocks_total",
                "Blocks of other replicas' trees that were taken over.",
            ),
            predicted_blocks: registry.counter(
                "warmroute_peer_predicted_blocks_total",
                "Predicted blocks that were taken over from another replica.",
            ),
            bytes: registry.counter(
                "warmroute_peer_tree_bytes_total",
                "Size of the trees that other replicas sent.",
            ),
            seconds: registry
                .histograms(
                    "warmroute_peer_tree_seconds",
                    "Time to copy one tree from another replica, without waiting for its turn.",
                    SECONDS,
                    &[],
                )
                .with_label_values::<&str>(&[]),
        }
    }
}
