//! What the bridge counts.

use prometheus::{IntCounter, IntGauge, IntGaugeVec};

use crate::observe::metrics::Registry;

#[derive(Clone, Debug)]
pub struct Metrics {
    pub batches: IntCounter,
    pub lives: IntCounter,
    /// Subscribers that were cut off.
    pub slow: IntCounter,
    /// Subscribers, and those who watch the health, that were refused because there were too many, or
    /// too many lists.
    pub refused: IntCounter,
    pub subscribers: IntGauge,
    pub serving: Serving,
    sizes: [IntGaugeVec; 5],
}

/// Whether each rank's events are served.
#[derive(Clone, Debug)]
pub struct Serving(IntGaugeVec);

impl Serving {
    pub fn set(&self, rank: u32, is_so: bool) {
        let gauge = self.0.with_label_values(&[&rank.to_string()]);
        gauge.set(i64::from(is_so));
    }
}

impl Metrics {
    pub fn new(registry: &Registry) -> Self {
        let size = |name, help| registry.gauges(name, help, &["rank"]);
        Self {
            batches: registry.counter(
                "warmroute_bridge_batches_total",
                "Batches of events taken from the engine.",
            ),
            lives: registry.counter(
                "warmroute_bridge_lives_total",
                "Times that a new life began: the engine is another process, or events were lost.",
            ),
            slow: registry.counter(
                "warmroute_bridge_subscribers_cut_total",
                "Subscribers that were cut off because they were too slow.",
            ),
            refused: registry.counter(
                "warmroute_bridge_subscribers_refused_total",
                "Subscribers and watchers of the health that were refused because subscribers_max were there.",
            ),
            subscribers: registry.gauge("warmroute_bridge_subscribers", "Subscribers."),
            serving: Serving(size(
                "warmroute_bridge_serving",
                "Whether the rank's events are followed and served.",
            )),
            sizes: [
                size(
                    "warmroute_bridge_history_batches",
                    "Batches kept for replays.",
                ),
                size("warmroute_bridge_history_bytes", "Bytes of those."),
                size("warmroute_bridge_held_blocks", "Blocks kept for snapshots."),
                size("warmroute_bridge_held_bytes", "Bytes of those."),
                size(
                    "warmroute_bridge_left_out_blocks",
                    "Stored blocks that are missing in snapshots since the cache was last cleared.",
                ),
            ],
        }
    }

    /// Batches and bytes of the history, blocks and bytes held, and blocks left out.
    pub fn measure(&self, rank: u32, sizes: [i64; 5]) {
        for (gauge, size) in self.sizes.iter().zip(sizes) {
            gauge.with_label_values(&[&rank.to_string()]).set(size);
        }
    }
}
