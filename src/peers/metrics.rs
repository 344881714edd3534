//! Metrics of what replicas share.

use super::status::Status;
use crate::observe::metrics::{Registry, metric_table};

/// From a small tree beside this replica to a large one over a slow network.
const TREE_SECONDS: &[f64] = &[0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 20.0, 60.0];

metric_table! {
    #[derive(Clone, Debug)]
    pub(super) struct Metrics {
        pub(super) peers: gauges "warmroute_peers" ["state"]
            "Other replicas, by state: connected, stale (silent for 1 s), unreachable (listed, and not connected) or \
             refused (another secret or version).",
        pub(super) lag: real_gauges "warmroute_peer_lag_seconds" ["peer"]
            "Age of the newest state of another replica, by its name.",
        bytes: counters "warmroute_peer_bytes_total" ["direction"]
            "Bytes of messages between this replica and the others, by direction: sent or received.",
        pub(super) connections: counter "warmroute_peer_connections_total"
            "Times that another replica was connected.",
        pub(super) lost: counters "warmroute_peer_lost_total" ["reason"]
            "Times that another replica was lost, by reason: closed (its stream ended), silent (for 3 s) or \
             drained.",
        pub(super) refused: counters "warmroute_peer_refused_total" ["reason"]
            "Streams of other replicas that were not used, by reason: secret, version, malformed, loopback (another \
             host without a secret), full (there are 64) or handshake (it did not end).",
        pub(super) unknown_workers: gauge "warmroute_peer_unknown_workers"
            "Workers that other replicas report and this one does not have. Replicas should have one fleet.",
        pub(super) ignored: counter "warmroute_peer_ignored_total"
            "What was ignored in messages of other replicas: workers without a name or beyond 65,536 with their \
             ranks, and messages that only a later release knows.",
        pub(super) skipped: counter "warmroute_peer_reports_skipped_total"
            "Reports that a slow replica was not sent. It gets the whole state later.",
        pub(super) connect_failures: counter "warmroute_peer_connect_failures_total"
            "Attempts to connect to the address of another replica that failed.",
        pub(super) lookup_failures: counter "warmroute_peer_lookup_failures_total"
            "Lookups of a name of `peers.discovery` that failed. The addresses known stay.",
    }
}

metric_table! {
    /// The trees that replicas copy from each other.
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
        pub(super) seconds: histogram "warmroute_peer_tree_seconds" in TREE_SECONDS
            "Time to copy one tree from another replica, without waiting for its turn.",
    }
}

impl Metrics {
    /// Registered whether or not there are other replicas, with both directions of bytes at 0.
    pub(super) fn register(registry: &Registry) -> Self {
        let metrics = Self::new(registry);
        metrics.on_sent(0);
        metrics.on_received(0);
        metrics
    }

    pub(super) fn on_sent(&self, bytes: usize) {
        let sent = self.bytes.with_label_values(&["sent"]);
        sent.inc_by(bytes as u64);
    }

    pub(super) fn on_received(&self, bytes: usize) {
        let received = self.bytes.with_label_values(&["received"]);
        received.inc_by(bytes as u64);
    }

    /// Sets the gauges.
    pub(super) fn show(&self, status: &Status) {
        for state in ["connected", "stale", "unreachable", "refused"] {
            let count = status.peers.iter().filter(|peer| peer.state == state);
            let gauge = self.peers.with_label_values(&[state]);
            gauge.set(count.count() as i64);
        }
        self.lag.reset();
        for peer in &status.peers {
            if let (Some(name), Some(lag)) = (&peer.name, peer.lag_ms) {
                let gauge = self.lag.with_label_values(&[name]);
                gauge.set(gauge.get().max(lag as f64 / 1_000.0));
            }
        }
        let unknown = status.peers.iter().map(|peer| peer.unknown_workers);
        let unknown: usize = unknown.sum();
        self.unknown_workers.set(unknown as i64);
    }
}
