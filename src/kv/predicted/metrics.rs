//! The metrics of the predicted index.

use prometheus::{IntCounter, IntGauge};

use crate::observe::metrics::Registry;

#[derive(Clone, Debug)]
pub struct Metrics {
    pub(super) blocks: IntGauge,
    pub(super) capacity: IntCounter,
    pub(super) memory: IntCounter,
    pub(super) age: IntCounter,
    pub(super) gone: IntCounter,
    pub(super) retracted: IntCounter,
}

impl Metrics {
    pub fn new(registry: &Registry) -> Self {
        let evicted = registry.counters(
            "warmroute_predicted_evicted_blocks_total",
            "Blocks no longer predicted to be cached, by reason: the worker's cache is full \
             (worker_capacity), the router's limit (router_memory), age, the worker restarted or left \
             (worker_gone), or it did not accept the request (request_not_accepted).",
            &["reason"],
        );
        let of = |reason| evicted.with_label_values(&[reason]);
        Self {
            blocks: registry.gauge(
                "warmroute_predicted_blocks",
                "Prompt blocks that workers are predicted to have cached.",
            ),
            capacity: of("worker_capacity"),
            memory: of("router_memory"),
            age: of("age"),
            gone: of("worker_gone"),
            retracted: of("request_not_accepted"),
        }
    }
}
