//! Metrics of the bridge.

use crate::kv::protobuf::LeftOutReason;
use crate::observe::metrics::metric_table;

metric_table! {
    #[derive(Clone, Debug)]
    pub struct Metrics {
        pub batches: counter "warmroute_bridge_batches_total" "Batches of KV events received from the engine.",
        pub incarnations: counter "warmroute_bridge_incarnations_total"
            "Engine incarnations: times that the engine restarted or events were lost.",
        left_out: counters "warmroute_bridge_left_out_events_total" ["rank", "reason"]
            "KV events that have no gRPC message and that subscribers do not get, by reason: no_tokens (stores of \
             default CPU offloading), inconsistent_fields, unknown_event.",
        pub slow: counter "warmroute_bridge_slow_subscribers_total" "Subscribers cut off because they were too slow.",
        pub refused: counter "warmroute_bridge_refused_subscribers_total"
            "Subscribers and health watchers refused because the maximum was reached.",
        pub subscribers: gauge "warmroute_bridge_subscribers" "Current subscribers.",
        serving: gauges "warmroute_bridge_serving" ["rank"]
            "1 while the bridge follows the rank's KV events and serves them to subscribers, else 0.",
        history_batches: gauges "warmroute_bridge_history_batches" ["rank"] "Batches in the replay history.",
        history_bytes: gauges "warmroute_bridge_history_bytes" ["rank"] "Bytes of the replay history.",
        cached_blocks: gauges "warmroute_bridge_cached_blocks" ["rank"]
            "Cached blocks that a snapshot for a new subscriber would contain.",
        cached_bytes: gauges "warmroute_bridge_cached_blocks_bytes" ["rank"]
            "Memory of the cached blocks kept for snapshots.",
        missing_blocks: gauges "warmroute_bridge_snapshot_missing_blocks" ["rank"]
            "Cached blocks missing from snapshots since the cache was last cleared.",
    }
}

impl Metrics {
    /// Whether a rank is served.
    pub fn set_serving(&self, rank: u32, is_serving: bool) {
        let gauge = self.serving.with_label_values(&[&rank.to_string()]);
        gauge.set(i64::from(is_serving));
    }

    pub fn left_out(&self, rank: u32, reason: LeftOutReason) {
        let labels = [&*rank.to_string(), reason.as_str()];
        self.left_out.with_label_values(&labels).inc();
    }

    /// Batches and bytes of the history; known blocks, their bytes, and missing blocks.
    pub fn measure(&self, rank: u32, sizes: [i64; 5]) {
        let gauges = [
            &self.history_batches,
            &self.history_bytes,
            &self.cached_blocks,
            &self.cached_bytes,
            &self.missing_blocks,
        ];
        for (gauge, size) in gauges.iter().zip(sizes) {
            gauge.with_label_values(&[&rank.to_string()]).set(size);
        }
    }
}
