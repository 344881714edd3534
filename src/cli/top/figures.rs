//! Rates and percentiles between two looks at the router. Pure.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use crate::admin::FleetPage;
use crate::observe::metrics_text::{Families, Series, buckets, total};

/// Percentiles and rates are of the last so many samples.
const SAMPLES: usize = 10;
/// Families that the table shows.
const FAMILIES: [&str; 10] = [
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

const WORKER: &str = "worker";

/// What a router said at one time.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) at: Instant,
    pub(super) fleet: FleetPage,
    pub(super) metrics: Families,
}

impl Sample {
    /// `metrics`: the page of that name. Families that the table does not show are left out.
    pub(super) fn new(at: Instant, fleet: FleetPage, metrics: &str) -> Self {
        let mut metrics = Families::parse(metrics, |name| FAMILIES.contains(&name));
        // Each line of the table asks for its worker's series: a search through those of 1,000 workers each time is slow.
        metrics.sort_by_label(WORKER);
        Self { at, fleet, metrics }
    }
}

#[derive(Debug, Default)]
pub(super) struct Samples(VecDeque<Sample>);

impl Samples {
    pub(super) fn add(&mut self, sample: Sample) {
        self.0.push_back(sample);
        while self.0.len() > SAMPLES {
            self.0.pop_front();
        }
    }

    pub(super) fn newest(&self) -> Option<&Sample> {
        self.0.back()
    }

    /// The first and the last sample, and the seconds between them.
    fn ends(&self) -> Option<(&Families, &Families, f64)> {
        let (first, last) = (self.0.front()?, self.0.back()?);
        let seconds = last.at.saturating_duration_since(first.at).as_secs_f64();
        (seconds > 0.0).then_some((&first.metrics, &last.metrics, seconds))
    }

    /// How much a sum has grown, a second. `None` without two samples.
    pub(super) fn rate(&self, family: &str, holds: impl Fn(&Series) -> bool) -> Option<f64> {
        self.growth(|metrics| metrics.sum(family, &holds))
    }

    /// The rate of a worker's series.
    pub(super) fn rate_of(&self, worker: &str, family: &str) -> Option<f64> {
        self.growth(|metrics| total(metrics.with_label(family, WORKER, worker)))
    }

    fn growth(&self, sum: impl Fn(&Families) -> f64) -> Option<f64> {
        let (first, last, seconds) = self.ends()?;
        // A router that was restarted counts from 0.
        Some((sum(last) - sum(first)).max(0.0) / seconds)
    }

    /// The share that one counter's growth is of another's. `None` if that has not grown.
    pub(super) fn share(&self, part: &str, whole: &str) -> Option<f64> {
        let whole = self.rate(whole, |_| true)?;
        (whole > 0.0).then_some(self.rate(part, |_| true)? / whole)
    }

    /// A percentile, in seconds, of what a histogram has got: of a worker's series, or of all. `None` without values.
    pub(super) fn percentile(&self, worker: Option<&str>, family: &str, share: f64) -> Option<f64> {
        let (first, last, _) = self.ends()?;
        let counts = |metrics: &Families| match worker {
            None => metrics.buckets(family),
            Some(worker) => {
                buckets(metrics.with_label(&format!("{family}_bucket"), WORKER, worker))
            }
        };
        let mut grown = counts(last);
        for (bound, count) in counts(first) {
            *grown.entry(bound).or_default() -= count;
        }
        let grown = grown.into_iter();
        let buckets: Vec<_> = grown
            .map(|(bound, count)| (f64::from_bits(bound), count))
            .collect();
        percentile(&buckets, share)
    }

    /// Decisions by reason, the most frequent first.
    pub(super) fn reasons(&self) -> Vec<(String, f64)> {
        const FAMILY: &str = "warmroute_routing_decisions_total";
        let Some((first, last, _)) = self.ends() else {
            return Vec::new();
        };
        let mut counts: BTreeMap<&str, f64> = BTreeMap::new();
        for (metrics, sign) in [(last, 1.0), (first, -1.0)] {
            for series in metrics.all(FAMILY) {
                *counts
                    .entry(series.label("reason").unwrap_or_default())
                    .or_default() += sign * series.value;
            }
        }
        let all: f64 = counts.values().sum();
        let counts = counts.into_iter().filter(|(_, count)| *count > 0.0);
        let mut shares: Vec<_> = counts
            .map(|(reason, count)| (reason.to_owned(), count / all))
            .collect();
        shares.sort_by(|a, b| b.1.total_cmp(&a.1));
        shares
    }

    /// The state of a worker's KV events, the worst of its ranks; empty if it has none.
    pub(super) fn events(&self, worker: &str) -> &str {
        let Some(sample) = self.newest() else {
            return "";
        };
        let states = sample
            .metrics
            .with_label("warmroute_kv_state", WORKER, worker);
        let states = states.iter().filter(|series| series.value > 0.0);
        let worst = states.max_by_key(|series| match series.label("state").unwrap_or_default() {
            "cold" => 3,
            "stale" => 2,
            "partial" => 1,
            _ => 0,
        });
        worst
            .and_then(|series| series.label("state"))
            .unwrap_or_default()
    }
}

/// A percentile of cumulative buckets by their upper bounds, linear inside a bucket.
fn percentile(buckets: &[(f64, f64)], share: f64) -> Option<f64> {
    let all = buckets.last()?.1;
    if all <= 0.0 {
        return None;
    }
    let wanted = share * all;
    let mut below = (0.0, 0.0);
    for (bound, count) in buckets {
        if *count >= wanted {
            if bound.is_infinite() {
                return Some(below.0);
            }
            let inside = count - below.1;
            let part = if inside > 0.0 {
                (wanted - below.1) / inside
            } else {
                1.0
            };
            return Some(below.0 + part * (bound - below.0));
        }
        below = (*bound, *count);
    }
    Some(below.0)
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::Duration;

    use super::*;
    use crate::observe;

    /// Two samples, two seconds apart.
    pub(in crate::cli::top) fn samples(fleet: &str, first: &str, last: &str) -> Samples {
        let at = observe::now();
        let mut samples = Samples::default();
        for (text, after) in [(first, 0), (last, 2)] {
            let fleet = serde_json::from_str(fleet).unwrap();
            samples.add(Sample::new(at + Duration::from_secs(after), fleet, text));
        }
        samples
    }

    #[test]
    fn rates_are_of_what_has_grown_between_the_samples() {
        let first = "warmroute_requests_total{worker=\"a\"} 10\n";
        let last =
            "warmroute_requests_total{worker=\"a\"} 16\nwarmroute_requests_total{worker=\"b\"} 2\n";
        let samples = samples("{}", first, last);
        let rate = |worker: &str| samples.rate_of(worker, "warmroute_requests_total");
        assert_eq!(
            (rate("a"), rate("b"), rate("c")),
            (Some(3.0), Some(1.0), Some(0.0))
        );
        assert_eq!(
            Samples::default().rate("warmroute_requests_total", |_| true),
            None
        );
    }

    #[test]
    fn a_router_that_was_restarted_has_no_negative_rate() {
        let samples = samples(
            "{}",
            "warmroute_queue_requests 9\n",
            "warmroute_queue_requests 1\n",
        );
        assert_eq!(
            samples.rate("warmroute_queue_requests", |_| true),
            Some(0.0)
        );
    }

    #[test]
    fn a_percentile_lies_in_its_bucket_and_the_last_bound_is_the_most_there_is_to_say() {
        let buckets = [(0.1, 0.0), (0.2, 10.0), (0.4, 20.0), (f64::INFINITY, 20.0)];
        let near = |share, expected: f64| {
            let found = percentile(&buckets, share).unwrap();
            assert!((found - expected).abs() < 1e-9, "{share}: {found}");
        };
        near(0.5, 0.2);
        near(0.75, 0.3);
        near(1.0, 0.4);
        assert_eq!(
            percentile(&[(0.1, 0.0), (f64::INFINITY, 4.0)], 0.5),
            Some(0.1)
        );
        assert_eq!(percentile(&[(0.1, 0.0)], 0.5), None);
        assert_eq!(percentile(&[], 0.5), None);
    }

    #[test]
    fn histograms_of_several_workers_add_up() {
        let line = |worker: &str, le: &str, count: u32| {
            format!(
                "warmroute_time_to_first_token_seconds_bucket{{worker=\"{worker}\",le=\"{le}\"}} {count}\n"
            )
        };
        let last = [
            line("a", "0.1", 1),
            line("a", "+Inf", 1),
            line("b", "0.1", 0),
            line("b", "1", 3),
            line("b", "+Inf", 3),
        ];
        let samples = samples("{}", "", &last.concat());
        let family = "warmroute_time_to_first_token_seconds";
        assert_eq!(samples.percentile(None, family, 0.25), Some(0.1));
        assert_eq!(samples.percentile(Some("a"), family, 0.5), Some(0.05));
        assert_eq!(samples.percentile(Some("c"), family, 0.5), None);
    }

    #[test]
    fn reasons_are_shares_and_events_are_those_of_the_worst_rank() {
        let last = "warmroute_routing_decisions_total{reason=\"cold\"} 1\n\
                    warmroute_routing_decisions_total{reason=\"longest_prefix\"} 3\n\
                    warmroute_kv_state{worker=\"a\",rank=\"0\",state=\"live\"} 1\n\
                    warmroute_kv_state{worker=\"a\",rank=\"1\",state=\"stale\"} 1\n\
                    warmroute_kv_state{worker=\"a\",rank=\"1\",state=\"live\"} 0\n";
        let samples = samples("{}", "", last);
        let expected = [
            ("longest_prefix".to_owned(), 0.75),
            ("cold".to_owned(), 0.25),
        ];
        assert_eq!(samples.reasons(), expected);
        assert_eq!((samples.events("a"), samples.events("b")), ("stale", ""));
    }
}
