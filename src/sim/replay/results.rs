//! The results of a replay, as a table and as JSON. Pure.

use std::time::Duration;

use serde::Serialize;

use super::policy::ComparedPolicy;
use super::run::Outcome;
use super::workload::Job;
use crate::sim::report;

/// All results of a replay. The same trace, settings and seed give the same bytes.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    pub(super) trace: TraceSummary,
    pub(super) settings: serde_json::Value,
    /// Upper bound of the cached ratio: one LRU cache of the whole fleet's size.
    pub(super) pooled_bound: f64,
    /// Upper bound of the cached ratio: an unlimited cache.
    pub(super) infinite_bound: f64,
    pub(super) policies: Vec<PolicyResult>,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct TraceSummary {
    pub(super) requests: usize,
    pub(super) prompt_tokens: u64,
    pub(super) output_tokens: u64,
    /// From the first arrival to the last, as replayed.
    pub(super) span_seconds: f64,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct PolicyResult {
    pub(super) policy: &'static str,
    /// A model of another router's formula.
    pub(super) is_model: bool,
    pub(super) cached_ratio: f64,
    pub(super) pooled_bound_ratio: f64,
    pub(super) infinite_bound_ratio: f64,
    pub(super) ttft_mean_seconds: f64,
    pub(super) ttft_p50_seconds: f64,
    pub(super) ttft_p90_seconds: f64,
    pub(super) ttft_p99_seconds: f64,
    /// From an arrival to the end of the answer.
    pub(super) answer_mean_seconds: f64,
    /// Requests of the busiest worker divided by the mean over workers.
    pub(super) request_imbalance: f64,
    /// The same for the prompt tokens that were computed.
    pub(super) token_imbalance: f64,
    pub(super) elapsed_seconds: f64,
    pub(super) requests_per_worker: Vec<u64>,
    /// Sorted, for the plot.
    #[serde(skip)]
    pub(super) times_to_first_token: Vec<Duration>,
}

impl TraceSummary {
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
            span_seconds: span.as_secs_f64(),
        }
    }
}

impl PolicyResult {
    pub(super) fn new(
        policy: ComparedPolicy,
        outcome: Outcome,
        tokens: u64,
        bounds: [f64; 2],
    ) -> Self {
        let mut sorted = outcome.times_to_first_token;
        sorted.sort_unstable();
        let percentile = |percent| report::percentile(&sorted, percent).as_secs_f64();
        let total: Duration = sorted.iter().sum();
        let answers = outcome.total_time.as_secs_f64();
        let cached_ratio = ratio(outcome.cached_tokens as f64, tokens as f64);
        Self {
            policy: policy.name(),
            is_model: policy.is_model(),
            cached_ratio,
            pooled_bound_ratio: ratio(cached_ratio, bounds[0]),
            infinite_bound_ratio: ratio(cached_ratio, bounds[1]),
            ttft_mean_seconds: ratio(total.as_secs_f64(), sorted.len() as f64),
            ttft_p50_seconds: percentile(50),
            ttft_p90_seconds: percentile(90),
            ttft_p99_seconds: percentile(99),
            answer_mean_seconds: ratio(answers, sorted.len() as f64),
            request_imbalance: imbalance(&outcome.requests_per_worker),
            token_imbalance: imbalance(&outcome.computed_per_worker),
            elapsed_seconds: outcome.elapsed.as_secs_f64(),
            requests_per_worker: outcome.requests_per_worker,
            times_to_first_token: sorted,
        }
    }
}

/// The largest count divided by the mean; 1 means balanced.
fn imbalance(counts: &[u64]) -> f64 {
    let total: u64 = counts.iter().sum();
    let most = counts.iter().max().copied().unwrap_or(0);
    ratio((most * counts.len() as u64) as f64, total as f64)
}

/// 0 if `whole` is 0.
fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

/// One row for each policy.
pub(super) fn table(rows: &[PolicyResult]) -> String {
    const HEADS: [&str; 11] = [
        "",
        "prompt",
        "of pooled",
        "of infinite",
        "TTFT",
        "TTFT",
        "TTFT",
        "TTFT",
        "answer",
        "requests",
        "computed",
    ];
    const UNITS: [&str; 11] = [
        "policy",
        "cached",
        "LRU bound",
        "cache",
        "mean",
        "p50",
        "p90",
        "p99",
        "mean",
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
            report::percent(row.cached_ratio),
            report::percent(row.pooled_bound_ratio),
            report::percent(row.infinite_bound_ratio),
            seconds(row.ttft_mean_seconds),
            seconds(row.ttft_p50_seconds),
            seconds(row.ttft_p90_seconds),
            seconds(row.ttft_p99_seconds),
            seconds(row.answer_mean_seconds),
            format!("{:.2}", row.request_imbalance),
            format!("{:.2}", row.token_imbalance),
        ]
    }));
    let mut text = report::aligned(&cells);
    if rows.iter().any(|row| row.is_model) {
        text.push_str(
            "* a model of another router's formula, with the same cache index and loads\n",
        );
    }
    text
}

/// Seconds with about three digits.
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

    pub(in crate::sim::replay) fn row(policy: ComparedPolicy, first_ms: &[u64]) -> PolicyResult {
        let times = first_ms.iter().copied().map(Duration::from_millis);
        let outcome = Outcome {
            times_to_first_token: times.collect(),
            total_time: Duration::from_secs(12),
            cached_tokens: 45,
            requests_per_worker: vec![3, 1],
            computed_per_worker: vec![30, 25],
            elapsed: Duration::from_secs(9),
        };
        PolicyResult::new(policy, outcome, 100, [0.5, 0.9])
    }

    #[test]
    fn a_table_has_a_row_for_each_policy() {
        let rows = [
            row(ComparedPolicy::Router(Policy::CacheAware), &[300, 100, 200]),
            row(
                ComparedPolicy::Model(Formula::LongestPrefix),
                &[12_340, 1_000, 200_000],
            ),
        ];
        let expected = "                   prompt   of pooled   of infinite     TTFT     TTFT     TTFT     TTFT   answer   requests   computed
policy             cached   LRU bound         cache     mean      p50      p90      p99     mean   max/mean   max/mean
cache_aware        45.0 %      90.0 %        50.0 %   0.20 s   0.20 s   0.30 s   0.30 s   4.00 s       1.50       1.09
longest_prefix *   45.0 %      90.0 %        50.0 %   71.1 s   12.3 s    200 s    200 s   4.00 s       1.50       1.09
* a model of another router's formula, with the same cache index and loads
";
        assert_eq!(table(&rows), expected);
    }

    #[test]
    fn the_imbalance_of_idle_workers_is_0() {
        assert_eq!(imbalance(&[0, 0]), 0.0);
        assert_eq!(imbalance(&[]), 0.0);
    }
}
