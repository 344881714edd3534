//! Counts of the whole fleet over the last minutes, for the charts of a page that was just opened. Pure.

use std::collections::VecDeque;
use std::time::Duration;

use serde::Serialize;

/// Time between two samples that are kept.
pub(super) const INTERVAL: Duration = Duration::from_secs(5);
/// A quarter of an hour.
const MAX_SAMPLES: usize = 180;

/// The counts at one time: counters since the router's start, which never run backwards, then gauges.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Sample {
    pub(super) at_unix_ms: u64,
    pub(super) counters: Vec<u64>,
    pub(super) gauges: Vec<u64>,
}

/// Turns sums over series into counters. The series of a worker that left are removed, so a sum may fall; what it falls
/// by is no count.
#[derive(Debug, Default)]
pub(super) struct Monotone {
    last_sums: Vec<u64>,
    counters: Vec<u64>,
}

impl Monotone {
    pub(super) fn advance(&mut self, sums: &[u64]) -> Vec<u64> {
        self.last_sums.resize(sums.len(), 0);
        self.counters.resize(sums.len(), 0);
        for ((counter, last), sum) in self.counters.iter_mut().zip(&mut self.last_sums).zip(sums) {
            *counter += sum.saturating_sub(*last);
            *last = *sum;
        }
        self.counters.clone()
    }
}

/// The samples that are kept, oldest first.
#[derive(Debug, Default, Serialize)]
pub(super) struct History(VecDeque<Sample>);

impl History {
    pub(super) fn add(&mut self, sample: Sample) {
        if self.0.len() == MAX_SAMPLES {
            self.0.pop_front();
        }
        self.0.push_back(sample);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_go_on_when_a_worker_takes_its_series_away() {
        let mut monotone = Monotone::default();
        assert_eq!(monotone.advance(&[10, 5]), [10, 5]);
        assert_eq!(monotone.advance(&[4, 6]), [10, 6]);
        assert_eq!(monotone.advance(&[7, 6]), [13, 6]);
    }

    #[test]
    fn the_oldest_samples_are_dropped() {
        let mut history = History::default();
        for at_unix_ms in 0..200 {
            history.add(Sample {
                at_unix_ms,
                ..Sample::default()
            });
        }
        assert_eq!(history.0.len(), MAX_SAMPLES);
        assert_eq!(history.0[0].at_unix_ms, 20);
        let json = serde_json::to_string(&history).unwrap();
        assert!(json.starts_with(r#"[{"at_unix_ms":20,"#));
    }
}
