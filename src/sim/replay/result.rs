//! A replay in numbers: the table for people and the JSON for programs. Pure.

use std::time::Duration;

use serde::Serialize;

use super::line::Line;
use super::run::Outcome;
use super::workload::Job;
use crate::sim::report;

/// Everything that a replay says. The same trace, settings and seed make the same bytes of it.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    pub(super) trace: TraceFacts,
    pub(super) settings: serde_json::Value,
    /// Share of prompt tokens that one cache of the whole fleet's size would serve.
    pub(super) pooled_bound: f64,
    /// Share that a cache that never forgets would serve.
    pub(super) infinite_bound: f64,
    pub(super) policies: Vec<Row>,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct TraceFacts {
    pub(super) requests: usize,
    pub(super) prompt_tokens: u64,
    pub(super) output_tokens: u64,
    /// From the first arrival to the last, as replayed.
    pub(super) span_s: f64,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub(super) policy: &'static str,
    /// Whether it is a model of somebody else's formula.
    pub(super) is_model: bool,
    pub(super) cached_share: f64,
    pub(super) share_of_pooled_bound: f64,
    pub(super) share_of_infinite_bound: f64,
    pub(super) ttft_mean_s: f64,
    pub(super) ttft_p50_s: f64,
    pub(super) ttft_p90_s: f64,
    pub(super) ttft_p99_s: f64,
    /// The busiest worker's requests against the average.
    pub(super) imbalance_requests: f64,
    /// The same of the prompt tokens that they had to compute.
    pub(super) imbalance_tokens: f64,
    pub(super) elapsed_s: f64,
    pub(super) requests_per_worker: Vec<u64>,
    /// In order, for the plot.
    #[serde(skip)]
    pub(super) first_tokens: Vec<Duration>,
}

impl TraceFacts {
    pub(super) fn of(jobs: &[Job]) -> Self {
        let sum = |tokens: fn(&Job) -> u32| jobs.iter().map(|job| u64::from(tokens(job))).sum();
        let span = match (jobs.first(), jobs.last()) {
            (Some(first), Some(last)) => last.at - first.at,
            _ => Duration::ZERO,
        };
        Self {
            requests: jobs.len(),
            prompt_tokens: sum(|job| job.input_tokens),
            output_tokens: sum(|job| job.output_tokens),
            span_s: span.as_secs_f64(),
        }
    }
}

impl Row {
    pub(super) fn new(line: Line, outcome: Outcome, tokens: u64, bounds: [f64; 2]) -> Self {
        let mut sorted = outcome.first_tokens;
        sorted.sort_unstable();
        let percentile = |percent| report::percentile(&sorted, percent).as_secs_f64();
        let total: Duration = sorted.iter().sum();
        let cached_share = ratio(outcome.cached_tokens as f64, tokens as f64);
        Self {
            policy: line.name(),
            is_model: !line.is_ours(),
            cached_share,
            share_of_pooled_bound: ratio(cached_share, bounds[0]),
            share_of_infinite_bound: ratio(cached_share, bounds[1]),
            ttft_mean_s: ratio(total.as_secs_f64(), sorted.len() as f64),
            ttft_p50_s: percentile(50),
            ttft_p90_s: percentile(90),
            ttft_p99_s: percentile(99),
            imbalance_requests: imbalance(&outcome.requests_per_worker),
            imbalance_tokens: imbalance(&outcome.computed_per_worker),
            elapsed_s: outcome.elapsed.as_secs_f64(),
            requests_per_worker: outcome.requests_per_worker,
            first_tokens: sorted,
        }
    }
}

/// The largest against the mean; 1 is even.
fn imbalance(counts: &[u64]) -> f64 {
    let total: u64 = counts.iter().sum();
    let most = counts.iter().max().copied().unwrap_or(0);
    ratio((most * counts.len() as u64) as f64, total as f64)
}

/// 0 where there is nothing to compare with.
fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

/// One row for each policy.
pub(super) fn table(rows: &[Row]) -> String {
    const HEADS: [&str; 10] = [
        "",
        "prompt",
        "of pooled",
        "of endless",
        "TTFT",
        "TTFT",
        "TTFT",
        "TTFT",
        "requests",
        "computed",
    ];
    const UNITS: [&str; 10] = [
        "policy",
        "cached",
        "LRU bound",
        "cache",
        "mean",
        "p50",
        "p90",
        "p99",
        "max/mean",
        "max/mean",
    ];
    let mut cells: Vec<Vec<String>> = [HEADS, UNITS]
        .iter()
        .map(|row| row.iter().map(|cell| (*cell).to_owned()).collect())
        .collect();
    cells.extend(rows.iter().map(|row| {
        let mark = if row.is_model { " *" } else { "" };
        vec![
            format!("{}{mark}", row.policy),
            report::percent(row.cached_share),
            report::percent(row.share_of_pooled_bound),
            report::percent(row.share_of_infinite_bound),
            seconds(row.ttft_mean_s),
            seconds(row.ttft_p50_s),
            seconds(row.ttft_p90_s),
            seconds(row.ttft_p99_s),
            format!("{:.2}", row.imbalance_requests),
            format!("{:.2}", row.imbalance_tokens),
        ]
    }));
    let mut text = report::aligned(&cells);
    if rows.iter().any(|row| row.is_model) {
        text.push_str("* a model of somebody else's formula, with the same knowledge as ours\n");
    }
    text
}

/// Three digits or so.
pub(super) fn seconds(seconds: f64) -> String {
    if seconds < 9.995 {
        format!("{seconds:.2} s")
    } else if seconds < 99.95 {
        format!("{seconds:.1} s")
    } else {
        format!("{seconds:.0} s")
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::routing::Policy;
    use crate::sim::replay::formula::Formula;

    pub(in crate::sim::replay) fn row(line: Line, first_ms: &[u64]) -> Row {
        let first_tokens = first_ms.iter().copied().map(Duration::from_millis);
        let outcome = Outcome {
            first_tokens: first_tokens.collect(),
            cached_tokens: 45,
            requests_per_worker: vec![3, 1],
            computed_per_worker: vec![30, 25],
            elapsed: Duration::from_secs(9),
        };
        Row::new(line, outcome, 100, [0.5, 0.9])
    }

    #[test]
    fn a_table_has_a_row_for_each_policy() {
        let rows = [
            row(Line::Ours(Policy::CacheAware), &[300, 100, 200]),
            row(
                Line::Theirs(Formula::LongestPrefix),
                &[12_340, 1_000, 200_000],
            ),
        ];
        let expected = "                   prompt   of pooled   of endless     TTFT     TTFT     TTFT     TTFT   requests   computed
policy             cached   LRU bound        cache     mean      p50      p90      p99   max/mean   max/mean
cache_aware        45.0 %      90.0 %       50.0 %   0.20 s   0.20 s   0.30 s   0.30 s       1.50       1.09
longest_prefix *   45.0 %      90.0 %       50.0 %   71.1 s   12.3 s    200 s    200 s       1.50       1.09
* a model of somebody else's formula, with the same knowledge as ours
";
        assert_eq!(table(&rows), expected);
    }

    #[test]
    fn nothing_is_divided_by_nothing() {
        assert_eq!(imbalance(&[0, 0]), 0.0);
        assert_eq!(imbalance(&[]), 0.0);
    }
}
