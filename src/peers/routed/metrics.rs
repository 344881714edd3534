//! The metrics of routed prompts.

use prometheus::IntCounter;

use crate::observe::metrics::Registry;

#[derive(Clone, Debug)]
pub(super) struct Metrics {
    pub(super) sent: IntCounter,
    pub(super) dropped: IntCounter,
    pub(super) new: IntCounter,
    pub(super) known: IntCounter,
    pub(super) without_parent: IntCounter,
    pub(super) unknown_worker: IntCounter,
    pub(super) unconfirmed: IntCounter,
}

impl Metrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let received = registry.counters(
            "warmroute_peer_routed_blocks_received_total",
            "Blocks of prompts that other replicas routed, by result: predicted to be cached now (new), predicted \
             before (known), of a worker that will report them by KV events (unconfirmed), not placed because the \
             block before them is not known (without_parent), of a worker that is not in this replica's fleet \
             (unknown_worker).",
            &["result"],
        );
        let of = |result| received.with_label_values(&[result]);
        Self {
            sent: registry.counter(
                "warmroute_peer_routed_blocks_sent_total",
                "Blocks of routed prompts in messages to other replicas. A message goes to all of them.",
            ),
            dropped: registry.counter(
                "warmroute_peer_routed_blocks_dropped_total",
                "Blocks of routed prompts that other replicas were not sent, because too many waited for the next \
                 report.",
            ),
            new: of("new"),
            known: of("known"),
            without_parent: of("without_parent"),
            unknown_worker: of("unknown_worker"),
            unconfirmed: of("unconfirmed"),
        }
    }
}
