//! Metrics of disaggregated requests.

use prometheus::{Histogram, IntCounter};
use rustc_hash::FxHashSet;

use crate::ids::Model;
use crate::observe::metrics::{FoundSeries, metric_table};

/// From a step within the router to a long prompt in a long queue.
const PHASE_SECONDS: &[f64] = &[
    0.000_1, 0.000_25, 0.000_5, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0, 30.0, 60.0, 120.0,
];

metric_table! {
    #[derive(Clone, Debug)]
    pub(in crate::relay) struct Families {
        requests: counters "warmroute_disaggregated_requests_total" ["model", "disaggregated"]
            "Attempts by whether they had a prefill and a decode leg: yes, or why not.",
        transfers: counters "warmroute_kv_transfers_total" ["model", "outcome"]
            "Prefill legs by the outcome of their KV transfer: completed; refused (the decode worker refused the \
             request); failed; abandoned (the blocks were never fetched and stay pinned until the engine's lease \
             ends); or why there was nothing to transfer.",
        phases: histograms "warmroute_disaggregated_phase_seconds" ["model", "phase"] in PHASE_SECONDS
            "Phases of the time to first token of a disaggregated request: queue (until the prefill leg is sent), \
             prefill (until it is answered), dispatch (until the decode leg is sent), decode (until its first \
             token; until its answer if that is not streamed).",
        pub(in crate::relay) pinned_forgotten: counter "warmroute_pinned_kv_transfers_forgotten_total"
            "KV transfers no longer counted as pinned because their worker had too many.",
    }
}

impl Families {
    pub(in crate::relay) fn find_models(&self, gone: &FxHashSet<Model>, found: &mut FoundSeries) {
        let is_gone = |model: &str| gone.contains(model);
        for family in [&self.requests, &self.transfers] {
            found.find(family, is_gone);
        }
        found.find(&self.phases, is_gone);
    }
}

/// One model's, resolved once.
#[derive(Debug)]
pub(in crate::relay) struct ModelMetrics {
    families: Families,
    name: Model,
    pub(in crate::relay) disaggregated: IntCounter,
    pub(in crate::relay) completed: IntCounter,
    pub(in crate::relay) queue: Histogram,
    pub(in crate::relay) prefill: Histogram,
    pub(in crate::relay) dispatch: Histogram,
    pub(in crate::relay) decode: Histogram,
}

impl ModelMetrics {
    pub(in crate::relay) fn new(families: &Families, name: &Model) -> Self {
        let phase = |phase| families.phases.with_label_values(&[&**name, phase]);
        Self {
            disaggregated: families.requests.with_label_values(&[&**name, "yes"]),
            completed: families
                .transfers
                .with_label_values(&[&**name, "completed"]),
            queue: phase("queue"),
            prefill: phase("prefill"),
            dispatch: phase("dispatch"),
            decode: phase("decode"),
            families: families.clone(),
            name: name.clone(),
        }
    }

    /// Counts an attempt without a prefill leg.
    pub(in crate::relay) fn count_local(&self, why: &str) {
        self.families
            .requests
            .with_label_values(&[&*self.name, why])
            .inc();
    }

    pub(in crate::relay) fn count_transfer(&self, outcome: &str) {
        self.families
            .transfers
            .with_label_values(&[&*self.name, outcome])
            .inc();
    }
}
