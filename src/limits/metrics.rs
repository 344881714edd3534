//! Metrics of limits.

use crate::observe::metrics::metric_table;

/// From a Redis on the same host to the longest time-out.
const STORE_SECONDS: &[f64] = &[
    0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5,
];

metric_table! {
    #[derive(Clone, Debug)]
    pub(super) struct Metrics {
        pub(super) admitted: counters "warmroute_limit_admitted_total" ["tenant", "decided"]
            "Requests of tenants with limits that had room, by where that was decided: shared (in Redis) or local (by this \
             replica alone).",
        pub(super) refusals: counters "warmroute_limit_refusals_total" ["tenant", "reason"]
            "Requests that the limits of their tenant refused, by reason: the limit that had no room, too_large (more than a \
             limit ever has), model, max_tokens, type (max_tokens, n or stream has another type), or store (Redis cannot be \
             asked).",
        pub(super) store_failures: counters "warmroute_limit_store_failures_total" ["operation"]
            "Operations on limits that Redis did not confirm, by operation.",
        pub(super) store_seconds: histogram "warmroute_limit_store_duration_seconds" in STORE_SECONDS
            "Duration of the round trips to Redis that charge requests to their tenant's limits.",
        /// 1 while the store does not answer.
        pub(super) without_store: gauge "warmroute_limits_without_store"
            "1 while Redis does not answer, so that limits.on_store_failure applies.",
        pub(super) settlements_dropped: counter "warmroute_limit_settlements_dropped_total"
            "Ended requests whose charge keeps what was reserved, because too many waited to be settled in Redis.",
    }
}
