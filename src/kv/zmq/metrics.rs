//! Metrics of ZeroMQ sources.

use crate::observe::metrics::metric_table;

metric_table! {
    #[derive(Clone, Debug)]
    pub struct Metrics {
        pub(super) connections: counter "warmroute_kv_zmq_connections_total"
            "ZeroMQ subscriptions to engines' KV events that were established.",
        disconnects: counters "warmroute_kv_zmq_disconnects_total" ["reason"]
            "ZeroMQ connections for KV events that ended or failed to connect, by reason.",
        pub(super) received_bytes: counter "warmroute_kv_zmq_received_bytes_total"
            "Bytes of KV event batches received over ZeroMQ, replayed ones included.",
        replays: counters "warmroute_kv_zmq_replays_total" ["outcome"] "Replay requests over ZeroMQ, by outcome.",
    }
}

impl Metrics {
    pub(super) fn disconnected(&self, reason: &str) {
        self.disconnects.with_label_values(&[reason]).inc();
    }

    pub(super) fn replay_ended(&self, outcome: &str) {
        self.replays.with_label_values(&[outcome]).inc();
    }
}
