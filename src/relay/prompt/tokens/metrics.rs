//! Metrics of tokenization: its duration by source, and the fallbacks to prediction.

use prometheus::{Histogram, IntCounter};

use super::fallback::FallbackReason;
use crate::observe::metrics::{Registry, words};

words! {
    /// Where token ids came from.
    #[derive(Clone, Copy)]
    pub(super) enum TokenSource {
        /// The router's tokenizer, on the I/O thread.
        Inline = "inline",
        /// The router's tokenizer, on a thread of the pool.
        Pool = "pool",
        Engine = "engine",
        /// The cache of token ids from engines.
        Cache = "cache",
    }
}

/// From a cached prompt to a text of megabytes.
const BUCKETS_SECONDS: &[f64] = &[
    0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025,
    0.05, 0.1, 0.25, 0.5,
];

#[derive(Debug)]
pub(super) struct Metrics {
    /// By `TokenSource`.
    duration: [Histogram; TokenSource::ALL.len()],
    fallbacks: Vec<(&'static str, IntCounter)>,
}

impl Metrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let duration = registry.histograms(
            "warmroute_tokenization_duration_seconds",
            "Time from a request body to its token ids, by source: inline, the tokenizer pool, an engine, or the cache of engine responses.",
            BUCKETS_SECONDS,
            &["source"],
        );
        let fallbacks = registry.counters(
            "warmroute_tokenization_fallbacks_total",
            "Prompts of models with a tokenizer that were routed without token ids, by reason. Prompts that the router cannot tokenize are in warmroute_tokenizer_prompts_total.",
            &["reason"],
        );
        Self {
            duration: TokenSource::ALL.map(|source| duration.with_label_values(&[source.as_str()])),
            fallbacks: FallbackReason::labels()
                .map(|reason| (reason, fallbacks.with_label_values(&[reason])))
                .collect(),
        }
    }

    pub(super) fn observe(&self, source: TokenSource, seconds: f64) {
        self.duration[source as usize].observe(seconds);
    }

    pub(super) fn count_fallback(&self, reason: &FallbackReason) {
        let label = reason.label();
        let mut counters = self.fallbacks.iter();
        if let Some((_, counter)) = counters.find(|(name, _)| Some(*name) == label) {
            counter.inc();
        }
    }
}
