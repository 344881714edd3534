//! What sources over gRPC count.

use prometheus::{IntCounter, IntCounterVec};
use tonic::{Code, Status};

use crate::observe::metrics::Registry;

#[derive(Clone, Debug)]
pub struct Metrics {
    pub(super) connected: IntCounter,
    ended: IntCounterVec,
    pub(super) received_bytes: IntCounter,
    questions: IntCounterVec,
}

impl Metrics {
    pub fn new(registry: &Registry) -> Self {
        Self {
            connected: registry.counter(
                "warmroute_kv_grpc_connections_total",
                "Subscriptions over gRPC to engines' cache events that were made.",
            ),
            ended: registry.counters(
                "warmroute_kv_grpc_ended_total",
                "Connections over gRPC for cache events that ended or were not made, by why.",
                &["reason"],
            ),
            received_bytes: registry.counter(
                "warmroute_kv_grpc_received_bytes_total",
                "Bytes of messages with cache events over gRPC, replayed ones included.",
            ),
            questions: registry.counters(
                "warmroute_kv_grpc_replays_total",
                "Questions over gRPC for earlier batches, by what came of them.",
                &["outcome"],
            ),
        }
    }

    pub(super) fn ended(&self, status: &Status) {
        let reason = reason(status.code());
        self.ended.with_label_values(&[reason]).inc();
    }

    pub(super) fn asked(&self, outcome: &str) {
        self.questions.with_label_values(&[outcome]).inc();
    }
}

/// For a counter's label, in gRPC's own words.
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
