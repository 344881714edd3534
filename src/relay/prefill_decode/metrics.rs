//! What is counted of split requests: of all, and of each model.

use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec};

use crate::ids::Model;
use crate::observe::metrics;

/// Seconds from a hand-over within this process to a long prompt in a long queue.
const PART_SECONDS: &[f64] = &[
    0.000_1, 0.000_25, 0.000_5, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0, 30.0, 60.0, 120.0,
];

/// What is counted of split requests.
#[derive(Clone, Debug)]
pub(in crate::relay) struct Families {
    splits: IntCounterVec,
    handoffs: IntCounterVec,
    parts: HistogramVec,
    pub(super) pinned_forgotten: IntCounter,
}

impl Families {
    pub(in crate::relay) fn new(registry: &metrics::Registry) -> Self {
        Self {
            splits: registry.counters(
                "warmroute_splits_total",
                "Tries by whether they were split over a prefill and a decode worker: yes, or why not.",
                &["model", "split"],
            ),
            handoffs: registry.counters(
                "warmroute_handoffs_total",
                "Prompts computed by one worker for another, by what became of them: used; refused by the decode worker; \
                 failed between the two; abandoned, so that blocks stay pinned until the lease ends, unless they were \
                 fetched for an answer that is not streamed and whose client left; or, where nothing was handed over, \
                 why.",
                &["model", "outcome"],
            ),
            parts: registry.histograms(
                "warmroute_split_ttft_seconds",
                "Parts of the time to the first token of a split request: queue (to the sending of the prefill leg), \
                 prefill (to its answer), handoff (to the sending of the decode leg), decode (to its first token; to \
                 its answer where that is not streamed).",
                PART_SECONDS,
                &["model", "part"],
            ),
            pinned_forgotten: registry.counter(
                "warmroute_pinned_handoffs_forgotten_total",
                "Handoffs that still kept blocks and are not counted as pinned any more, since a worker had too many.",
            ),
        }
    }
}

/// One model's, resolved once.
#[derive(Debug)]
pub(in crate::relay) struct OfModel {
    families: Families,
    name: Model,
    pub(super) split: IntCounter,
    pub(super) used: IntCounter,
    pub(super) queue: Histogram,
    pub(super) prefill: Histogram,
    pub(super) handoff: Histogram,
    pub(super) decode: Histogram,
}

impl OfModel {
    pub(in crate::relay) fn new(families: &Families, name: &Model) -> Self {
        let part = |part| families.parts.with_label_values(&[&**name, part]);
        Self {
            split: families.splits.with_label_values(&[&**name, "yes"]),
            used: families.handoffs.with_label_values(&[&**name, "used"]),
            queue: part("queue"),
            prefill: part("prefill"),
            handoff: part("handoff"),
            decode: part("decode"),
            families: families.clone(),
            name: name.clone(),
        }
    }

    /// Counts a try that is not split.
    pub(in crate::relay) fn on_whole(&self, why: &str) {
        self.families
            .splits
            .with_label_values(&[&*self.name, why])
            .inc();
    }

    pub(super) fn on_handoff(&self, outcome: &str) {
        self.families
            .handoffs
            .with_label_values(&[&*self.name, outcome])
            .inc();
    }
}
