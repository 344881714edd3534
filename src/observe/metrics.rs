//! A registry, and constructors that name a metric and put it there in one step.
//!
//! Each part owns a struct of its metrics and is handed the registry when it is built. Handles with
//! labels are resolved once (a worker, a model), so that a request only adds to atomics.

use prometheus::core::Collector;
use prometheus::{
    Encoder, GaugeVec, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, TextEncoder,
};

/// Every metric of one process (or of one test).
#[derive(Clone, Debug, Default)]
pub struct Registry(prometheus::Registry);

impl Registry {
    pub fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.put(IntCounter::new(name, help))
    }

    pub fn counters(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.put(IntCounterVec::new(Opts::new(name, help), labels))
    }

    pub fn gauge(&self, name: &str, help: &str) -> IntGauge {
        self.put(IntGauge::new(name, help))
    }

    pub fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
        self.put(IntGaugeVec::new(Opts::new(name, help), labels))
    }

    /// Gauges of what is no whole number.
    pub fn real_gauges(&self, name: &str, help: &str, labels: &[&str]) -> GaugeVec {
        self.put(GaugeVec::new(Opts::new(name, help), labels))
    }

    pub fn histograms(
        &self,
        name: &str,
        help: &str,
        buckets: &[f64],
        labels: &[&str],
    ) -> HistogramVec {
        self.put(HistogramVec::new(
            HistogramOpts::new(name, help).buckets(buckets.to_vec()),
            labels,
        ))
    }

    /// The Prometheus text format, version 0.0.4.
    pub fn text(&self) -> String {
        let mut text = Vec::new();
        // Writing to a Vec cannot fail, and an empty page is the honest answer if it ever does.
        let _ = TextEncoder::new().encode(&self.0.gather(), &mut text);
        String::from_utf8(text).unwrap_or_default()
    }

    fn put<C: Collector + Clone + 'static>(&self, metric: prometheus::Result<C>) -> C {
        let metric = metric.expect("metric names and labels are literals");
        self.0
            .register(Box::new(metric.clone()))
            .expect("each metric is registered once");
        metric
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_shows_in_the_text_with_its_labels() {
        let registry = Registry::default();
        let counters = registry.counters("things_total", "Things.", &["kind"]);
        counters.with_label_values(&["odd"]).inc_by(3);
        assert!(registry.text().contains("things_total{kind=\"odd\"} 3"));
    }
}
