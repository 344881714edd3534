//! Metrics of limits.

use prometheus::{Histogram, IntCounter, IntCounterVec, IntGauge};

use crate::observe::metrics::Registry;

/// From a Redis on the same host to the longest time-out.
const STORE_SECONDS: &[f64] = &[
    0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5,
];

#[derive(Clone, Debug)]
pub(super) struct Metrics {
    pub(super) admitted: IntCounterVec,
    pub(super) refusals: IntCounterVec,
    pub(super) store_failures: IntCounterVec,
    pub(super) store_seconds: Histogram,
    /// 1 while the store does not answer.
    pub(super) without_store: IntGauge,
    pub(super) settlements_dropped: IntCounter,
}

impl Metrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let store_seconds = registry.histograms(
            "warmroute_limit_store_duration_seconds",
            "Duration of the round trips to Redis that charge requests to their tenant's limits.",
            STORE_SECONDS,
            &[],
        );
        Self {
            admitted: registry.counters(
                "warmroute_limit_admitted_total",
                "Requests of tenants with limits that had room, by where that was decided: shared (in Redis) or \
                 local (by this replica alone).",
                &["tenant", "decided"],
            ),
            refusals: registry.counters(
                "warmroute_limit_refusals_total",
                "Requests that the limits of their tenant refused, by reason: the limit that had no room, too_large \
                 (more than a limit ever has), model, max_tokens, type (max_tokens, n or stream has another type), or store (Redis cannot be asked).",
                &["tenant", "reason"],
            ),
            store_failures: registry.counters(
                "warmroute_limit_store_failures_total",
                "Operations on limits that Redis did not confirm, by operation.",
                &["operation"],
            ),
            store_seconds: store_seconds.with_label_values::<&str>(&[]),
            without_store: registry.gauge(
                "warmroute_limits_without_store",
                "1 while Redis does not answer, so that limits.on_store_failure applies.",
            ),
            settlements_dropped: registry.counter(
                "warmroute_limit_settlements_dropped_total",
                "Ended requests whose charge keeps what was reserved, because too many waited to be settled in Redis.",
            ),
        }
    }
}
