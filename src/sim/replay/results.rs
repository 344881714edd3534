//! The results of a replay, as a table and as JSON. Pure.

use std::time::Duration;

use serde::Serialize;

use super::policy::ComparedPolicy;
use super::run::{AnswerTime, Outcome};
use super::workload::Job;
use crate::sim::report;
use crate::sim::step_time::{Batch, StepTimes};

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
    /// The 99th percentile of the TTFT divided by what an idle engine without cache would take.
    pub(super) slowdown_p99: f64,
    /// Of each answer the mean time between two tokens: the mean and the 99th percentile over answers.
    pub(super) itl_mean_seconds: f64,
    pub(super) itl_p99_seconds: f64,
    /// From an arrival to the end of the answer.
    pub(super) answer_mean_seconds: f64,
    pub(super) answer_p99_seconds: f64,
    /// The part of all requests that the busiest worker got.
    pub(super) largest_share: f64,
    /// Requests of the busiest worker divided by the mean over workers.
    pub(super) request_imbalance: f64,
    /// Computed prompt tokens of the worker with the most of them, divided by the mean over workers.
    pub(super) token_imbalance: f64,
    pub(super) elapsed_seconds: f64,
    pub(super) requests_per_worker: Vec<u64>,
    pub(super) busy_seconds_per_worker: Vec<f64>,
    /// Answers that outgrew the KV memory and were computed again.
    pub(super) preemptions: u64,
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
    /// `times`: the step times of the mean engine; `bounds`: of the cached ratio.
    pub(super) fn new(
        policy: ComparedPolicy,
        outcome: Outcome,
        jobs: &[Job],
        times: &StepTimes,
        bounds: [f64; 2],
    ) -> Self {
        let first = sorted(&outcome, |answer| answer.first_token);
        let whole = sorted(&outcome, |answer| answer.whole);
        let answers = outcome.answers.iter().zip(jobs);
        let mut token_times: Vec<Duration> = answers
            .filter(|(_, job)| job.output_tokens > 1)
            .map(|(answer, job)| (answer.whole - answer.first_token) / (job.output_tokens - 1))
            .collect();
        token_times.sort_unstable();
        let prompts = jobs.iter().map(|job| u64::from(job.input_tokens));
        let cached_ratio = ratio(outcome.cached_tokens as f64, prompts.sum::<u64>() as f64);
        let requests = &outcome.requests_per_worker;
        let most = requests.iter().max().copied().unwrap_or(0);
        let busy = outcome.busy_per_worker.iter();
        Self {
            policy: policy.name(),
            is_model: policy.is_model(),
            cached_ratio,
            pooled_bound_ratio: ratio(cached_ratio, bounds[0]),
            infinite_bound_ratio: ratio(cached_ratio, bounds[1]),
            ttft_mean_seconds: mean(&first),
            ttft_p50_seconds: report::percentile(&first, 50).as_secs_f64(),
            ttft_p90_seconds: report::percentile(&first, 90).as_secs_f64(),
            ttft_p99_seconds: report::percentile(&first, 99).as_secs_f64(),
            slowdown_p99: slowdown_p99(&outcome.answers, jobs, times),
            itl_mean_seconds: mean(&token_times),
            itl_p99_seconds: report::percentile(&token_times, 99).as_secs_f64(),
            answer_mean_seconds: mean(&whole),
            answer_p99_seconds: report::percentile(&whole, 99).as_secs_f64(),
            largest_share: ratio(most as f64, requests.iter().sum::<u64>() as f64),
            request_imbalance: imbalance(requests),
            token_imbalance: imbalance(&outcome.computed_per_worker),
            elapsed_seconds: outcome.elapsed.as_secs_f64(),
            busy_seconds_per_worker: busy.map(Duration::as_secs_f64).collect(),
            requests_per_worker: outcome.requests_per_worker,
            preemptions: outcome.preemptions,
            times_to_first_token: first,
        }
    }
}

fn sorted(outcome: &Outcome, time: fn(&AnswerTime) -> Duration) -> Vec<Duration> {
    let mut times: Vec<Duration> = outcome.answers.iter().map(time).collect();
    times.sort_unstable();
    times
}

fn mean(times: &[Duration]) -> f64 {
    let sum: Duration = times.iter().sum();
    ratio(sum.as_secs_f64(), times.len() as f64)
}

fn slowdown_p99(answers: &[AnswerTime], jobs: &[Job], times: &StepTimes) -> f64 {
    let answers = answers.iter().zip(jobs);
    let mut slowdowns: Vec<f64> = answers
        .map(|(answer, job)| {
            let alone = times.of(Batch {
                prompt_tokens: job.input_tokens.into(),
                ..Batch::default()
            });
            ratio(answer.first_token.as_secs_f64(), alone.as_secs_f64())
        })
        .collect();
    slowdowns.sort_unstable_by(f64::total_cmp);
    report::percentile(&slowdowns, 99)
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
    const HEADS: [[&str; 2]; 15] = [
        ["", "policy"],
        ["prompt", "cached"],
        ["of pooled", "LRU bound"],
        ["TTFT", "mean"],
        ["TTFT", "p50"],
        ["TTFT", "p90"],
        ["TTFT", "p99"],
        ["slowdown", "p99"],
        ["ITL", "mean"],
        ["ITL", "p99"],
        ["answer", "mean"],
        ["answer", "p99"],
        ["requests", "largest"],
        ["computed", "max/mean"],
        ["preempted", "answers"],
    ];
    let mut cells: Vec<Vec<String>> = [0, 1]
        .map(|line| HEADS.iter().map(|head| head[line].to_owned()).collect())
        .into();
    cells.extend(rows.iter().map(|row| {
        let mark = if row.is_model { " *" } else { "" };
        vec![
            format!("{}{mark}", row.policy),
            report::percent(row.cached_ratio),
            report::percent(row.pooled_bound_ratio),
            seconds(row.ttft_mean_seconds),
            seconds(row.ttft_p50_seconds),
            seconds(row.ttft_p90_seconds),
            seconds(row.ttft_p99_seconds),
            format!("{:.1}", row.slowdown_p99),
            format!("{:.1} ms", 1_000.0 * row.itl_mean_seconds),
            format!("{:.1} ms", 1_000.0 * row.itl_p99_seconds),
            seconds(row.answer_mean_seconds),
            seconds(row.answer_p99_seconds),
            report::percent(row.largest_share),
            format!("{:.2}", row.token_imbalance),
            row.preemptions.to_string(),
        ]
    }));
    let mut text = report::aligned(&cells);
    if rows.iter().any(|row| row.is_model) {
        text.push_str(MODEL_NOTE);
    }
    text
}

pub(super) const MODEL_NOTE: &str =
    "* a model of another router's formula, with the same cache index and loads\n";

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
    use crate::sim::replay::workload;
    use crate::sim::replay::workload::tests::{entry, settings};
    use crate::sim::step_time::AnswerTimes;

    pub(in crate::sim::replay) fn row(policy: ComparedPolicy, first_ms: &[u64]) -> PolicyResult {
        let jobs = workload::jobs(&vec![entry(0, 100, &[1]); first_ms.len()], &settings());
        let times = first_ms.iter().copied().map(Duration::from_millis);
        let answer = |first_token| AnswerTime {
            arrived: Duration::ZERO,
            first_token,
            whole: first_token + Duration::from_secs(4),
        };
        let outcome = Outcome {
            answers: times.map(answer).collect(),
            cached_tokens: 45 * jobs.len() as u64,
            requests_per_worker: vec![3, 1],
            computed_per_worker: vec![30, 25],
            busy_per_worker: vec![Duration::from_secs(8), Duration::from_secs(7)],
            preemptions: 2,
            elapsed: Duration::from_secs(9),
        };
        let times = StepTimes::new(Duration::ZERO, AnswerTimes::NONE, 1_000.0);
        PolicyResult::new(policy, outcome, &jobs, &times, [0.5, 0.9])
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
        let expected = "                   prompt   of pooled     TTFT     TTFT     TTFT     TTFT   slowdown         ITL         ITL   answer   answer   requests   computed   preempted
policy             cached   LRU bound     mean      p50      p90      p99        p99        mean         p99     mean      p99    largest   max/mean     answers
cache_aware        45.0 %      90.0 %   0.20 s   0.20 s   0.30 s   0.30 s        3.0   4000.0 ms   4000.0 ms   4.20 s   4.30 s     75.0 %       1.09           2
longest_prefix *   45.0 %      90.0 %   71.1 s   12.3 s    200 s    200 s     2000.0   4000.0 ms   4000.0 ms   75.1 s    204 s     75.0 %       1.09           2
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
