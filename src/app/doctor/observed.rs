//! The pages of a running router, as far as the rules read them. Pure.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use serde_json::Value;

use crate::admin::{FleetPage, KvPage, WorkerRow};
use crate::observe::metrics_text::{Families, Series};
use crate::{store, units};

/// What a router shows of its fleet.
#[derive(Debug)]
pub struct Observed {
    pub fleet: FleetPage,
    /// How the store of responses is.
    pub store: store::Health,
    pub kv: KvPage,
    /// The configuration that runs.
    pub config: Value,
    pub metrics: Families,
}

impl Observed {
    /// The sum of a metric's samples whose labels have these values.
    pub(super) fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.metrics.sum(name, |series| has(series, labels))
    }

    /// The sums of a metric's samples by a label's value.
    pub(super) fn by_label(&self, name: &str, label: &str) -> BTreeMap<String, f64> {
        let mut sums = BTreeMap::new();
        for series in self.metrics.all(name) {
            if let Some(value) = series.label(label) {
                *sums.entry(value.to_owned()).or_default() += series.value;
            }
        }
        sums
    }

    /// The sample of a metric whose labels have these values.
    pub(super) fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let mut samples = self.metrics.all(name).iter();
        let sample = samples.find(|series| has(series, labels));
        sample.map(|series| series.value)
    }

    /// The bounds of the bucket that has a histogram's quantile, and how many values there are. `None` without values; the
    /// upper bound of the last bucket is infinite.
    pub(super) fn quantile(&self, name: &str, quantile: f64) -> Option<(Range<f64>, f64)> {
        let counts = self.metrics.buckets(name);
        let total = *counts.values().last()?;
        let mut lower = 0.0;
        for (bound, count) in counts {
            let upper = f64::from_bits(bound);
            if count >= quantile * total {
                return (total > 0.0).then_some((lower..upper, total));
            }
            lower = upper;
        }
        None
    }

    /// How many observations of a histogram may be above a bound.
    pub(super) fn above(&self, name: &str, bound: f64) -> f64 {
        let counts = self.metrics.buckets(name);
        let all = counts.values().last().copied().unwrap_or_default();
        let below = counts.range(..=bound.to_bits()).next_back();
        all - below.map_or(0.0, |(_, count)| *count)
    }

    /// A duration of the configuration, such as `/requests/first_byte_timeout`.
    pub(super) fn duration(&self, pointer: &str) -> Option<Duration> {
        units::parse_duration(self.config.pointer(pointer)?.as_str()?).ok()
    }

    /// The entries of `models` in the configuration.
    pub(super) fn models(&self) -> &[Value] {
        let models = self.config.get("models").and_then(Value::as_array);
        models.map_or(&[], Vec::as_slice)
    }

    /// The workers' part of all requests; even parts before the first request.
    pub(super) fn share<'w>(&self, workers: impl Iterator<Item = &'w WorkerRow>) -> f64 {
        let all = &self.fleet.workers;
        let total: u64 = all.iter().map(|worker| worker.requests_total).sum();
        let (mut count, mut requests) = (0, 0);
        for worker in workers {
            count += 1;
            requests += worker.requests_total;
        }
        match total {
            0 => f64::from(count) / all.len().max(1) as f64,
            total => requests as f64 / total as f64,
        }
    }
}

fn has(series: &Series, labels: &[(&str, &str)]) -> bool {
    let mut labels = labels.iter();
    labels.all(|(label, value)| series.label(label) == Some(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observed(metrics: &str) -> Observed {
        Observed {
            fleet: FleetPage::default(),
            store: store::Health {
                is_up: true,
                reason: String::new(),
                warning: String::new(),
            },
            kv: KvPage::default(),
            config: Value::Null,
            metrics: Families::parse(metrics, |_| true),
        }
    }

    #[test]
    fn metrics_are_read_with_their_labels() {
        let text = "# HELP a b\na{x=\"1\",y=\"say \\\"hi\\\", {ok}\"} 2\na{x=\"2\",y=\"\"} 3\nplain 4.5\nbroken{x=\"1} 1\n";
        let observed = observed(text);
        assert_eq!(observed.metrics.all("broken"), []);
        let first = &observed.metrics.all("a")[0];
        assert_eq!(first.label("y"), Some("say \"hi\", {ok}"));
        assert_eq!(observed.sum("a", &[]), 5.0);
        assert_eq!(observed.sum("a", &[("x", "2")]), 3.0);
        assert_eq!(observed.sum("plain", &[]), 4.5);
    }

    #[test]
    fn a_quantile_is_within_its_bucket_over_all_series() {
        let text = "t_bucket{w=\"0\",le=\"0.5\"} 90\nt_bucket{w=\"0\",le=\"2\"} 100\nt_bucket{w=\"0\",le=\"+Inf\"} 100\n\
                    t_bucket{w=\"1\",le=\"0.5\"} 90\nt_bucket{w=\"1\",le=\"2\"} 99\nt_bucket{w=\"1\",le=\"+Inf\"} 100\n";
        let observed = observed(text);
        assert_eq!(observed.quantile("t", 0.5), Some((0.0..0.5, 200.0)));
        assert_eq!(observed.quantile("t", 0.99), Some((0.5..2.0, 200.0)));
        let beyond = Some((2.0..f64::INFINITY, 200.0));
        assert_eq!(observed.quantile("t", 1.0), beyond);
        assert_eq!(observed.quantile("other", 0.5), None);
    }

    #[test]
    fn what_is_in_the_bucket_of_a_bound_may_be_above_it() {
        let text = "t_bucket{le=\"0.5\"} 90\nt_bucket{le=\"2\"} 99\nt_bucket{le=\"+Inf\"} 100\n";
        let observed = observed(text);
        for (bound, above) in [(0.1, 100.0), (0.5, 10.0), (1.0, 10.0), (2.0, 1.0)] {
            assert_eq!(observed.above("t", bound), above, "{bound}");
        }
        assert_eq!(observed.above("other", 1.0), 0.0);
    }
}
