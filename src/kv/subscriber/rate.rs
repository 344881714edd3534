//! How many things happened lately, a second.

use std::time::{Duration, Instant};

/// Long enough to be read, short enough to be now.
const SECONDS: usize = 10;

#[derive(Debug)]
pub(super) struct Rate {
    born: Instant,
    counts: [u64; SECONDS],
    /// The second that was counted last.
    newest: u64,
}

impl Rate {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            born: now,
            counts: [0; SECONDS],
            newest: 0,
        }
    }

    pub(super) fn add(&mut self, now: Instant, count: u64) {
        self.move_on(now);
        self.counts[self.newest as usize % SECONDS] += count;
    }

    pub(super) fn per_second(&mut self, now: Instant) -> f64 {
        self.move_on(now);
        let age = now.saturating_duration_since(self.born);
        let window = age.clamp(Duration::from_secs(1), Duration::from_secs(SECONDS as u64));
        self.counts.iter().sum::<u64>() as f64 / window.as_secs_f64()
    }

    fn move_on(&mut self, now: Instant) {
        let second = now.saturating_duration_since(self.born).as_secs();
        for passed in (self.newest + 1..=second).take(SECONDS) {
            self.counts[passed as usize % SECONDS] = 0;
        }
        self.newest = self.newest.max(second);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_long_past_no_longer_counts() {
        let start = crate::observe::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut rate = Rate::new(start);
        rate.add(start, 100);
        assert_eq!(rate.per_second(at(1)), 100.0);
        rate.add(at(4), 100);
        assert_eq!(rate.per_second(at(9)), 200.0 / 9.0);
        assert_eq!(rate.per_second(at(12)), 10.0);
        assert_eq!(rate.per_second(at(1_000)), 0.0);
    }
}
