//! Measurements of a run, and tables and sentences that compare two runs. Pure.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

/// Reasons of failures in the error text; a demo that fails rarely fails for several.
const MAX_REASONS: usize = 3;

/// Measurements of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Prompt tokens and cached prompt tokens come from the usage that the engine reports.
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    /// From sending the request to the first token of the answer.
    pub time_to_first_token: Duration,
    pub inter_token_latencies: Vec<Duration>,
}

/// The sum of the measurements of a run so far.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    prompt_tokens: u64,
    cached_tokens: u64,
    times_to_first_token: Vec<Duration>,
    inter_token_latencies: Vec<Duration>,
    /// The number of failed requests, by reason.
    failures: BTreeMap<String, u64>,
}

impl Tally {
    pub fn add(&mut self, result: Result<Sample, String>) {
        match result {
            Ok(sample) => {
                self.prompt_tokens += sample.prompt_tokens;
                self.cached_tokens += sample.cached_tokens;
                self.times_to_first_token.push(sample.time_to_first_token);
                self.inter_token_latencies
                    .extend(sample.inter_token_latencies);
            }
            Err(reason) => *self.failures.entry(reason).or_default() += 1,
        }
    }

    pub fn requests(&self) -> u64 {
        self.times_to_first_token.len() as u64 + self.failed()
    }

    pub fn failed(&self) -> u64 {
        self.failures.values().sum()
    }

    /// `3 x status 503, 1 x no answer`: the most frequent reason first; empty without failures.
    pub fn failure_summary(&self) -> String {
        let mut reasons: Vec<(&String, &u64)> = self.failures.iter().collect();
        reasons.sort_by_key(|(_, count)| Reverse(**count));
        let mut texts: Vec<String> = reasons
            .iter()
            .take(MAX_REASONS)
            .map(|(reason, count)| format!("{count} x {reason}"))
            .collect();
        if reasons.len() > MAX_REASONS {
            texts.push("and others".to_owned());
        }
        texts.join(", ")
    }

    /// Cached prompt tokens divided by all prompt tokens, 0 to 1.
    pub fn cached_ratio(&self) -> f64 {
        match self.prompt_tokens {
            0 => 0.0,
            tokens => self.cached_tokens as f64 / tokens as f64,
        }
    }

    /// A percentile over the requests.
    pub fn time_to_first_token(&self, percent: u32) -> Duration {
        percentile(&sorted(&self.times_to_first_token), percent)
    }

    pub fn mean_time_to_first_token(&self) -> Duration {
        let sum: Duration = self.times_to_first_token.iter().sum();
        let count = self.times_to_first_token.len().max(1);
        sum / u32::try_from(count).unwrap_or(u32::MAX)
    }

    /// A percentile over all pairs of consecutive tokens of all answers.
    pub fn inter_token_latency(&self, percent: u32) -> Duration {
        percentile(&sorted(&self.inter_token_latencies), percent)
    }
}

fn sorted(times: &[Duration]) -> Vec<Duration> {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    sorted
}

/// The nearest-rank percentile, which is always one of the values. Zero if there are none.
pub fn percentile<T: Copy + Default>(sorted: &[T], percent: u32) -> T {
    let rank = (sorted.len() * percent as usize).div_ceil(100).max(1);
    sorted
        .get(rank - 1)
        .or(sorted.last())
        .copied()
        .unwrap_or_default()
}

/// The result of a finished run.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub name: &'static str,
    pub tally: Tally,
    pub requests_per_worker: Vec<u64>,
    pub elapsed: Duration,
}

/// One row for each measure, one column for each run.
pub fn table(outcomes: &[Outcome]) -> String {
    type Percentile = fn(&Tally, u32) -> Duration;
    let percentile = |name: &str, value: Percentile, percent: u32| {
        row(outcomes, &format!("{name} p{percent}"), |outcome| {
            milliseconds(value(&outcome.tally, percent))
        })
    };
    let first_token = |percent| percentile("TTFT", Tally::time_to_first_token, percent);
    let inter_token =
        |percent| percentile("inter-token latency", Tally::inter_token_latency, percent);
    aligned(&[
        row(outcomes, "", |outcome| outcome.name.to_owned()),
        row(outcomes, "prompt tokens from cache", |outcome| {
            percent(outcome.tally.cached_ratio())
        }),
        first_token(50),
        first_token(90),
        first_token(99),
        inter_token(50),
        inter_token(99),
        row(outcomes, "requests per worker", |outcome| {
            let counts = outcome.requests_per_worker.iter().map(u64::to_string);
            counts.collect::<Vec<_>>().join(" ")
        }),
        row(outcomes, "total time", |outcome| {
            format!("{:.1} s", outcome.elapsed.as_secs_f64())
        }),
    ])
}

/// One row each for one router, replicas that share and replicas that do not.
pub fn replica_table(replicas: u32, outcomes: &[Outcome; 3]) -> String {
    let names = [
        "one router".to_owned(),
        format!("{replicas} routers that share"),
        format!("{replicas} routers that do not share"),
    ];
    let head = ["", "prompt tokens from cache", "TTFT p50", "TTFT mean"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for (name, Outcome { tally, .. }) in names.into_iter().zip(outcomes) {
        rows.push(vec![
            name,
            percent(tally.cached_ratio()),
            milliseconds(tally.time_to_first_token(50)),
            milliseconds(tally.mean_time_to_first_token()),
        ]);
    }
    aligned(&rows)
}

/// Compares two policies in a sentence.
pub fn comparison(before: &Outcome, after: &Outcome) -> String {
    let ratios = (before.tally.cached_ratio(), after.tally.cached_ratio());
    let cached = if ratios.0 > 0.0 {
        format!("{:.1} times as many prompt tokens", ratios.1 / ratios.0)
    } else {
        format!("{} of prompt tokens instead of 0 %", percent(ratios.1))
    };
    format!(
        "With {}, {cached} came from the prefix cache,\n\
         and the median time to first token (TTFT) was {} than with {}.",
        after.name,
        change(before, after, |tally| tally.time_to_first_token(50)),
        before.name
    )
}

/// Compares engines that do everything with disaggregated prefill/decode, in a sentence.
pub fn disaggregation_comparison(before: &Outcome, after: &Outcome) -> String {
    format!(
        "With {}, the p99 inter-token latency was {},\n\
         and the median time to first token (TTFT) was {} than with {}.",
        after.name,
        change(before, after, |tally| tally.inter_token_latency(99)),
        change(before, after, |tally| tally.time_to_first_token(50)),
        before.name
    )
}

/// `2.0 times lower`.
fn change(before: &Outcome, after: &Outcome, time: impl Fn(&Tally) -> Duration) -> String {
    let [before, after] = [before, after].map(|outcome| time(&outcome.tally).as_secs_f64());
    if before <= 0.0 || after <= 0.0 {
        "not measured".to_owned()
    } else if after <= before {
        format!("{:.1} times lower", before / after)
    } else {
        format!("{:.1} times higher", after / before)
    }
}

/// `1234567` as `1,234,567`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

pub fn percent(ratio: f64) -> String {
    format!("{:.1} %", ratio * 100.0)
}

pub fn milliseconds(time: Duration) -> String {
    format!("{:.0} ms", time.as_secs_f64() * 1_000.0)
}

fn row(outcomes: &[Outcome], label: &str, cell: impl Fn(&Outcome) -> String) -> Vec<String> {
    std::iter::once(label.to_owned())
        .chain(outcomes.iter().map(cell))
        .collect()
}

/// A table whose first column is left-aligned and whose other columns are right-aligned.
pub fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let widths: Vec<usize> = (0..columns)
        .map(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0))
        .collect();
    let mut text = String::new();
    for row in rows {
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            match column {
                0 => text.push_str(&format!("{cell:width$}")),
                _ => text.push_str(&format!("   {cell:>width$}")),
            }
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(name: &'static str, cached_tokens: u64, first_ms: &[u64]) -> Outcome {
        let mut tally = Tally::default();
        for ms in first_ms {
            tally.add(Ok(Sample {
                prompt_tokens: 100,
                cached_tokens,
                time_to_first_token: Duration::from_millis(*ms),
                inter_token_latencies: vec![
                    Duration::from_millis(10),
                    Duration::from_millis(ms / 10),
                ],
            }));
        }
        Outcome {
            name,
            tally,
            requests_per_worker: vec![2, 1],
            elapsed: Duration::from_millis(1_250),
        }
    }

    #[test]
    fn a_percentile_is_the_nearest_rank() {
        let times: Vec<Duration> = (1..=10).map(Duration::from_secs).collect();
        for (percent, seconds) in [(0, 1), (10, 1), (50, 5), (51, 6), (90, 9), (99, 10)] {
            let found = percentile(&times, percent);
            assert_eq!(found, Duration::from_secs(seconds), "{percent}");
        }
        assert_eq!(percentile(&times[..1], 99), Duration::from_secs(1));
        assert_eq!(percentile(&times[..0], 50), Duration::ZERO);
    }

    #[test]
    fn failures_are_counted_by_reason() {
        let mut tally = outcome("one", 50, &[1]).tally;
        for reason in ["status 503", "no answer", "status 503"] {
            tally.add(Err(reason.to_owned()));
        }
        assert_eq!((tally.requests(), tally.failed()), (4, 3));
        assert_eq!(tally.failure_summary(), "2 x status 503, 1 x no answer");
        assert_eq!(tally.cached_ratio(), 0.5);
    }

    #[test]
    fn long_numbers_are_grouped() {
        for (number, text) in [
            (0, "0"),
            (999, "999"),
            (1_000, "1,000"),
            (1_234_567, "1,234,567"),
        ] {
            assert_eq!(grouped(number), text);
        }
    }

    #[test]
    fn columns_are_aligned() {
        let outcomes = [
            outcome("round_robin", 25, &[400, 200, 1_200]),
            outcome("cache_aware", 75, &[100, 90, 80]),
        ];
        let expected = "                           round_robin   cache_aware
prompt tokens from cache        25.0 %        75.0 %
TTFT p50                        400 ms         90 ms
TTFT p90                       1200 ms        100 ms
TTFT p99                       1200 ms        100 ms
inter-token latency p50          10 ms         10 ms
inter-token latency p99         120 ms         10 ms
requests per worker                2 1           2 1
total time                       1.2 s         1.2 s
";
        assert_eq!(table(&outcomes), expected);
    }

    #[test]
    fn replicas_are_compared_line_by_line() {
        let outcomes = [
            outcome("one router", 75, &[100, 200, 600]),
            outcome("sharing", 70, &[120, 200, 700]),
            outcome("not sharing", 25, &[300, 400, 1_100]),
        ];
        let expected =
            "                              prompt tokens from cache   TTFT p50   TTFT mean
one router                                      75.0 %     200 ms      300 ms
3 routers that share                            70.0 %     200 ms      340 ms
3 routers that do not share                     25.0 %     400 ms      600 ms
";
        assert_eq!(replica_table(3, &outcomes), expected);
    }

    #[test]
    fn inter_token_latencies_are_of_all_answers_together() {
        let outcomes = [
            outcome("combined", 25, &[400, 200, 1_200]),
            outcome("disaggregated", 25, &[100, 500, 80]),
        ];
        let table = table(&outcomes);
        let table = table.split_whitespace().collect::<Vec<_>>().join(" ");
        for row in [
            "inter-token latency p50 10 ms 10 ms",
            "inter-token latency p99 120 ms 50 ms",
        ] {
            assert!(table.contains(row), "{table}");
        }
        let text = disaggregation_comparison(&outcomes[0], &outcomes[1]);
        assert!(
            text.contains("p99 inter-token latency was 2.4 times lower"),
            "{text}"
        );
        assert!(
            text.contains("4.0 times lower than with combined"),
            "{text}"
        );
    }

    #[test]
    fn a_comparison_says_which_side_is_better() {
        let slow = outcome("slow", 25, &[400]);
        let fast = outcome("fast", 75, &[100]);
        let text = comparison(&slow, &fast);
        assert!(text.contains("3.0 times as many prompt tokens"), "{text}");
        assert!(text.contains("4.0 times lower"), "{text}");
        assert!(comparison(&fast, &slow).contains("4.0 times higher"));
    }
}
