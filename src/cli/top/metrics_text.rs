//! The series of `/metrics` that the table shows, by their families. Pure.

use std::collections::BTreeMap;

use crate::observe::metrics_text::{Series, series};

/// Families that the table shows; the rest is left out.
const KEPT: [&str; 10] = [
    "warmroute_requests_total",
    "warmroute_request_errors_total",
    "warmroute_prompt_tokens_total",
    "warmroute_cached_prompt_tokens_total",
    "warmroute_generation_tokens_total",
    "warmroute_routing_decisions_total",
    "warmroute_time_to_first_token_seconds_bucket",
    "warmroute_inter_token_latency_seconds_bucket",
    "warmroute_kv_state",
    "warmroute_queue_requests",
];

#[derive(Clone, Debug, Default)]
pub(super) struct Metrics(BTreeMap<String, Vec<Series>>);

impl Metrics {
    pub(super) fn parse(text: &str) -> Self {
        let mut families: BTreeMap<String, Vec<Series>> = BTreeMap::new();
        for (name, series) in series(text, |name| KEPT.contains(&name)) {
            families.entry(name.to_owned()).or_default().push(series);
        }
        Self(families)
    }

    pub(super) fn all(&self, family: &str) -> &[Series] {
        self.0.get(family).map_or(&[], Vec::as_slice)
    }

    /// The sum of the series that a condition holds for.
    pub(super) fn sum(&self, family: &str, holds: impl Fn(&Series) -> bool) -> f64 {
        let series = self.all(family).iter().filter(|series| holds(series));
        // Of no series it is 0, and not the -0 that `sum` begins with.
        series.fold(0.0, |sum, series| sum + series.value)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn series_are_read_with_escaped_labels_and_others_are_left_out() {
        let metrics = Metrics::parse(
            "# HELP warmroute_requests_total x\n\
             warmroute_requests_total{model=\"a\\\"b}\",worker=\"w 0\"} 3\n\
             warmroute_requests_total{model=\"m\",worker=\"w1\"} 4.5\n\
             warmroute_requests_total_other 9\n\
             process_cpu_seconds_total 1\n\
             warmroute_queue_requests 2\n",
        );
        let found = metrics.all("warmroute_requests_total");
        assert_eq!(
            (found[0].label("model"), found[0].label("worker")),
            (Some("a\"b}"), Some("w 0"))
        );
        assert_eq!(metrics.sum("warmroute_requests_total", |_| true), 7.5);
        assert_eq!(
            metrics.sum("warmroute_requests_total", |series| series.label("worker")
                == Some("w1")),
            4.5
        );
        assert_eq!(metrics.sum("warmroute_queue_requests", |_| true), 2.0);
        assert_eq!(metrics.all("process_cpu_seconds_total"), []);
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_left_out(text in "warmroute_kv_state[{}\"=,\\\\a1 \n]{0,40}") {
            let _ = Metrics::parse(&text);
        }
    }
}
