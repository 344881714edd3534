//! Metrics of gRPC sources.

use tonic::{Code, Status};

use crate::observe::metrics::metric_table;

metric_table! {
    #[derive(Clone, Debug)]
    pub struct Metrics {
        pub(super) connections: counter "warmroute_kv_grpc_connections_total"
            "gRPC subscriptions to engines' KV events that were established.",
        disconnects: counters "warmroute_kv_grpc_disconnects_total" ["reason"]
            "gRPC connections for KV events that ended or failed to connect, by reason.",
        pub(super) received_bytes: counter "warmroute_kv_grpc_received_bytes_total"
            "Bytes of KV event messages received over gRPC, replayed ones included.",
        replays: counters "warmroute_kv_grpc_replays_total" ["outcome"] "Replay requests over gRPC, by outcome.",
    }
}

impl Metrics {
    pub(super) fn disconnected(&self, status: &Status) {
        let reason = reason(status.code());
        self.disconnects.with_label_values(&[reason]).inc();
    }

    pub(super) fn replay_ended(&self, outcome: &str) {
        self.replays.with_label_values(&[outcome]).inc();
    }
}

/// The metric label: gRPC's name of the status code.
fn reason(code: Code) -> &'static str {
    match code {
        Code::Unavailable => "unavailable",
        Code::OutOfRange => "out_of_range",
        Code::DataLoss => "data_loss",
        Code::FailedPrecondition => "failed_precondition",
        Code::Unimplemented => "unimplemented",
        Code::InvalidArgument => "invalid_argument",
        Code::ResourceExhausted => "resource_exhausted",
        Code::Aborted => "aborted",
        Code::Cancelled => "cancelled",
        Code::Internal => "internal",
        Code::Unknown => "unknown",
        Code::PermissionDenied | Code::Unauthenticated => "unauthorized",
        Code::Ok | Code::DeadlineExceeded | Code::NotFound | Code::AlreadyExists => "other",
    }
}
