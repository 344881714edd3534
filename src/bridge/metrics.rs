//! Metrics of the bridge.

use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec};

use crate::kv::protobuf::LeftOutReason;
use crate::observe::metrics::Registry;

#[derive(Clone, Debug)]
pub struct Metrics {
    pub batches: IntCounter,
    pub incarnations: IntCounter,
    left_out: IntCounterVec,
    /// Subscribers cut off for being too slow.
    pub slow: IntCounter,
    /// Subscribers and health watchers refused because too many calls or snapshots were open.
    pub refused: IntCounter,
    pub subscribers: IntGauge,
    pub serving: Serving,
    sizes: [IntGaugeVec; 5],
}

/// Whether each rank is served.
#[derive(Clone, Debug)]
pub struct Serving(IntGaugeVec);

impl Serving {
    pub fn set(&self, rank: u32, is_serving: bool) {
        let gauge = self.0.with_label_values(&[&rank.to_string()]);
        gauge.set(i64::from(is_serving));
    }
}

impl Metrics {
    pub fn new(registry: &Registry) -> Self {
        let size = |name, help| registry.gauges(name, help, &["rank"]);
        Self {
            batches: registry.counter(
                "warmroute_bridge_batches_total",
                "Batches of KV events received from the engine.",
            ),
            incarnations: registry.counter(
                "warmroute_bridge_incarnations_total",
                "Engine incarnations: times that the engine restarted or events were lost.",
            ),
            left_out: registry.counters(
                "warmroute_bridge_left_out_events_total",
                "KV events that have no gRPC message and that subscribers do not get, by reason: no_tokens (stores of \
                 default CPU offloading), inconsistent_fields, unknown_event.",
                &["rank", "reason"],
            ),
            slow: registry.counter(
                "warmroute_bridge_slow_subscribers_total",
                "Subscribers cut off because they were too slow.",
            ),
            refused: registry.counter(
                "warmroute_bridge_refused_subscribers_total",
                "Subscribers and health watchers refused because the maximum was reached.",
            ),
            subscribers: registry.gauge("warmroute_bridge_subscribers", "Current subscribers."),
            serving: Serving(size(
                "warmroute_bridge_serving",
                "1 while the bridge follows the rank's KV events and serves them to subscribers, else 0.",
            )),
            sizes: [
                size(
                    "warmroute_bridge_history_batches",
                    "Batches in the replay history.",
                ),
                size(
                    "warmroute_bridge_history_bytes",
                    "Bytes of the replay history.",
                ),
                size(
                    "warmroute_bridge_cached_blocks",
                    "Cached blocks that a snapshot for a new subscriber would contain.",
                ),
                size(
                    "warmroute_bridge_cached_blocks_bytes",
                    "Memory of the cached blocks kept for snapshots.",
                ),
                size(
                    "warmroute_bridge_snapshot_missing_blocks",
                    "Cached blocks missing from snapshots since the cache was last cleared.",
                ),
            ],
        }
    }

    pub fn left_out(&self, rank: u32, reason: LeftOutReason) {
        let labels = [&*rank.to_string(), reason.as_str()];
        self.left_out.with_label_values(&labels).inc();
    }

    /// Batches and bytes of the history; known blocks, their bytes, and missing blocks.
    pub fn measure(&self, rank: u32, sizes: [i64; 5]) {
        for (gauge, size) in self.sizes.iter().zip(sizes) {
            gauge.with_label_values(&[&rank.to_string()]).set(size);
        }
    }
}
