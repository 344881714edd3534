//! Metrics of ZeroMQ sources.

use prometheus::{IntCounter, IntCounterVec};

use crate::observe::metrics::Registry;

#[derive(Clone, Debug)]
pub struct Metrics {
    pub(super) connections: IntCounter,
    disconnects: IntCounterVec,
    pub(super) received_bytes: IntCounter,
    replays: IntCounterVec,
}

impl Metrics {
    pub fn new(registry: &Registry) -> Self {
        Self {
            connections: registry.counter(
                "warmroute_kv_zmq_connections_total",
                "ZeroMQ subscriptions to engines' KV events that were established.",
            ),
            disconnects: registry.counters(
                "warmroute_kv_zmq_disconnects_total",
                "ZeroMQ connections for KV events that ended or failed to connect, by reason.",
                &["reason"],
            ),
            received_bytes: registry.counter(
                "warmroute_kv_zmq_received_bytes_total",
                "Bytes of KV event batches received over ZeroMQ, replayed ones included.",
            ),
            replays: registry.counters(
                "warmroute_kv_zmq_replays_total",
                "Replay requests over ZeroMQ, by outcome.",
                &["outcome"],
            ),
        }
    }

    pub(super) fn disconnected(&self, reason: &str) {
        self.disconnects.with_label_values(&[reason]).inc();
    }

    pub(super) fn replay_ended(&self, outcome: &str) {
        self.replays.with_label_values(&[outcome]).inc();
    }
}
