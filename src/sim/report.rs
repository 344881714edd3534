//! What came of a run, and two runs side by side. Pure.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

/// Reasons of failures that are told; what breaks a demo rarely has more than one.
const REASONS_MAX: usize = 3;

/// What one request's answer told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Both as the engine's own usage has them.
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    /// From sending the request to the first token of the answer.
    pub first_token: Duration,
    /// Between two tokens of the answer.
    pub gaps: Vec<Duration>,
}

/// A run so far.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    prompt_tokens: u64,
    cached_tokens: u64,
    first_tokens: Vec<Duration>,
    gaps: Vec<Duration>,
    /// Reason -> how often.
    failures: BTreeMap<String, u64>,
}

impl Tally {
    pub fn add(&mut self, result: Result<Sample, String>) {
        match result {
            Ok(sample) => {
                self.prompt_tokens += sample.prompt_tokens;
                self.cached_tokens += sample.cached_tokens;
                self.first_tokens.push(sample.first_token);
                self.gaps.extend(sample.gaps);
            }
            Err(reason) => *self.failures.entry(reason).or_default() += 1,
        }
    }

    pub fn requests(&self) -> u64 {
        self.first_tokens.len() as u64 + self.failed()
    }

    pub fn failed(&self) -> u64 {
        self.failures.values().sum()
    }

    /// `3 x status 503, 1 x no answer`: the most frequent first; empty without failures.
    pub fn reasons(&self) -> String {
        let mut reasons: Vec<(&String, &u64)> = self.failures.iter().collect();
        reasons.sort_by_key(|(_, count)| Reverse(**count));
        let mut texts: Vec<String> = reasons
            .iter()
            .take(REASONS_MAX)
            .map(|(reason, count)| format!("{count} x {reason}"))
            .collect();
        if reasons.len() > REASONS_MAX {
            texts.push("and others".to_owned());
        }
        texts.join(", ")
    }

    /// Of all prompt tokens, the part that came out of a cache, 0 to 1.
    pub fn cached_share(&self) -> f64 {
        match self.prompt_tokens {
            0 => 0.0,
            tokens => self.cached_tokens as f64 / tokens as f64,
        }
    }

    /// The time to the first token that this many percent of the requests did not exceed.
    pub fn first_token(&self, percent: u32) -> Duration {
        percentile(&sorted(&self.first_tokens), percent)
    }

    /// The time between two tokens that this many percent of all such times did not exceed.
    pub fn gap(&self, percent: u32) -> Duration {
        percentile(&sorted(&self.gaps), percent)
    }
}

fn sorted(times: &[Duration]) -> Vec<Duration> {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    sorted
}

/// By nearest rank: always a value that was seen. Zero if there is none.
pub fn percentile(sorted: &[Duration], percent: u32) -> Duration {
    let rank = (sorted.len() * percent as usize).div_ceil(100).max(1);
    sorted
        .get(rank - 1)
        .or(sorted.last())
        .copied()
        .unwrap_or_default()
}

/// A run that is over.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub name: &'static str,
    pub tally: Tally,
    pub requests_per_worker: Vec<u64>,
    pub elapsed: Duration,
}

/// One row for each measure, one column for each outcome.
pub fn table(outcomes: &[Outcome]) -> String {
    aligned(&measures(outcomes, Vec::new()))
}

/// With the times between tokens as well.
pub fn table_with_gaps(outcomes: &[Outcome]) -> String {
    let gap = |percent: u32| {
        let label = format!("time between tokens, p{percent}");
        row(outcomes, &label, |it| milliseconds(it.tally.gap(percent)))
    };
    aligned(&measures(outcomes, vec![gap(50), gap(99)]))
}

fn measures(outcomes: &[Outcome], more: Vec<Vec<String>>) -> Vec<Vec<String>> {
    let percentile = |percent: u32| {
        let label = format!("time to first token, p{percent}");
        row(outcomes, &label, |it| {
            milliseconds(it.tally.first_token(percent))
        })
    };
    let mut rows = vec![
        row(outcomes, "", |it| it.name.to_owned()),
        row(outcomes, "prompt tokens from cache", |it| {
            percent(it.tally.cached_share())
        }),
        percentile(50),
        percentile(90),
        percentile(99),
    ];
    rows.extend(more);
    rows.extend([
        row(outcomes, "requests a worker", |it| {
            let counts = it.requests_per_worker.iter().map(u64::to_string);
            counts.collect::<Vec<_>>().join(" ")
        }),
        row(outcomes, "total time", |it| {
            format!("{:.1} s", it.elapsed.as_secs_f64())
        }),
    ]);
    rows
}

/// Two outcomes in a sentence.
pub fn comparison(before: &Outcome, after: &Outcome) -> String {
    let shares = (before.tally.cached_share(), after.tally.cached_share());
    let cached = if shares.0 > 0.0 {
        format!("{:.1} times the share", shares.1 / shares.0)
    } else {
        format!("{} instead of 0 %", percent(shares.1))
    };
    let waited = change(before.tally.first_token(50), after.tally.first_token(50));
    format!(
        "With {}, engines took {cached} of prompt tokens from cache,\n\
         and the median time to first token was {waited}, than with {}.",
        after.name, before.name
    )
}

/// Two outcomes that differ in who computes prompts, in a sentence.
pub fn comparison_of_gaps(before: &Outcome, after: &Outcome) -> String {
    let (ours, theirs) = (&after.tally, &before.tally);
    format!(
        "With {}, the longest times between tokens (p99) were {},\n\
         and the median time to first token was {}, than with {}.",
        after.name,
        change(theirs.gap(99), ours.gap(99)),
        change(theirs.first_token(50), ours.first_token(50)),
        before.name
    )
}

/// `2.0 times shorter`.
fn change(before: Duration, after: Duration) -> String {
    let (before, after) = (before.as_secs_f64(), after.as_secs_f64());
    if before <= 0.0 || after <= 0.0 {
        "not measured".to_owned()
    } else if after <= before {
        format!("{:.1} times shorter", before / after)
    } else {
        format!("{:.1} times longer", after / before)
    }
}

/// `1234567` as `1,234,567`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

pub fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

pub fn milliseconds(time: Duration) -> String {
    format!("{:.0} ms", time.as_secs_f64() * 1_000.0)
}

fn row(outcomes: &[Outcome], label: &str, cell: impl Fn(&Outcome) -> String) -> Vec<String> {
    std::iter::once(label.to_owned())
        .chain(outcomes.iter().map(cell))
        .collect()
}

/// Labels to the left, everything else to the right.
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
                first_token: Duration::from_millis(*ms),
                gaps: vec![Duration::from_millis(10), Duration::from_millis(ms / 10)],
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
        assert_eq!(percentile(&[], 50), Duration::ZERO);
    }

    #[test]
    fn failures_are_counted_by_reason() {
        let mut tally = outcome("one", 50, &[1]).tally;
        for reason in ["status 503", "no answer", "status 503"] {
            tally.add(Err(reason.to_owned()));
        }
        assert_eq!((tally.requests(), tally.failed()), (4, 3));
        assert_eq!(tally.reasons(), "2 x status 503, 1 x no answer");
        assert_eq!(tally.cached_share(), 0.5);
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
time to first token, p50        400 ms         90 ms
time to first token, p90       1200 ms        100 ms
time to first token, p99       1200 ms        100 ms
requests a worker                  2 1           2 1
total time                       1.2 s         1.2 s
";
        assert_eq!(table(&outcomes), expected);
    }

    #[test]
    fn times_between_tokens_are_of_all_answers_together() {
        let outcomes = [
            outcome("combined", 25, &[400, 200, 1_200]),
            outcome("split", 25, &[100, 500, 80]),
        ];
        let table = table_with_gaps(&outcomes);
        let table = table.split_whitespace().collect::<Vec<_>>().join(" ");
        for row in [
            "time between tokens, p50 10 ms 10 ms",
            "time between tokens, p99 120 ms 50 ms",
        ] {
            assert!(table.contains(row), "{table}");
        }
        let text = comparison_of_gaps(&outcomes[0], &outcomes[1]);
        assert!(text.contains("(p99) were 2.4 times shorter"), "{text}");
        assert!(
            text.contains("4.0 times shorter, than with combined"),
            "{text}"
        );
    }

    #[test]
    fn the_comparison_says_which_way_it_went() {
        let slow = outcome("slow", 25, &[400]);
        let fast = outcome("fast", 75, &[100]);
        let text = comparison(&slow, &fast);
        assert!(text.contains("engines took 3.0 times the share"), "{text}");
        assert!(text.contains("4.0 times shorter"), "{text}");
        assert!(comparison(&fast, &slow).contains("4.0 times longer"));
    }
}
