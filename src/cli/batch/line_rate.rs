//! How fast the lines of a batch are finished, and when the last will be. Pure.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Routers report finished lines in groups, some seconds apart; over a minute that evens out.
const WINDOW: Duration = Duration::from_secs(60);
/// One more than the shortest interval between two looks, 100 ms, puts into a window.
const MAX_SAMPLES: usize = 601;

/// The numbers of finished lines of the last minute.
#[derive(Debug, Default)]
pub(super) struct LineRate {
    samples: VecDeque<(Instant, u64)>,
}

impl LineRate {
    pub(super) fn add(&mut self, now: Instant, finished: u64) {
        let is_old = |&(at, _): &(Instant, u64)| now.saturating_duration_since(at) > WINDOW;
        // The last of the old samples is where the window begins.
        while self.samples.len() >= MAX_SAMPLES || self.samples.get(1).is_some_and(is_old) {
            self.samples.pop_front();
        }
        self.samples.push_back((now, finished));
    }

    /// Lines a second. None before two samples, or while nothing is finished.
    pub(super) fn per_second(&self) -> Option<f64> {
        let (&(first, before), &(last, after)) = (self.samples.front()?, self.samples.back()?);
        let seconds = last.saturating_duration_since(first).as_secs_f64();
        let lines = after.saturating_sub(before);
        (seconds > 0.0 && lines > 0).then(|| lines as f64 / seconds)
    }

    /// The time that so many lines will take, in whole seconds.
    pub(super) fn time_left(&self, lines: u64) -> Option<Duration> {
        let seconds = (lines as f64 / self.per_second()?).ceil();
        Duration::try_from_secs_f64(seconds).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;

    #[test]
    fn the_rate_is_that_of_the_last_minute() {
        let begin = observe::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut rate = LineRate::default();
        assert_eq!(rate.per_second(), None);
        rate.add(at(0), 1_000);
        assert_eq!(rate.per_second(), None);
        rate.add(at(10), 1_000);
        assert_eq!((rate.per_second(), rate.time_left(5)), (None, None));
        rate.add(at(20), 1_100);
        assert_eq!(rate.per_second(), Some(5.0));
        assert_eq!(rate.time_left(12), Some(Duration::from_secs(3)));
        // Five minutes later nothing of that counts but where the window begins.
        rate.add(at(300), 1_100);
        rate.add(at(310), 1_200);
        rate.add(at(370), 1_800);
        assert_eq!(rate.per_second(), Some(10.0));
    }

    #[test]
    fn samples_are_bounded() {
        let begin = observe::now();
        let mut rate = LineRate::default();
        for number in 0..10_000 {
            rate.add(begin + Duration::from_millis(number), number);
        }
        assert_eq!(rate.samples.len(), MAX_SAMPLES);
    }
}
