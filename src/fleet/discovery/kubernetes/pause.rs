//! How long to wait after a failure. Pure.

use std::time::Duration;

/// Short: most failures are one broken connection.
const FIRST: Duration = Duration::from_millis(200);
/// A failure after this much quiet is not one of a row.
const QUIET: Duration = Duration::from_secs(5);

/// Pauses that double from failure to failure, with jitter so that replicas do not ask all at once.
#[derive(Debug)]
pub(super) struct Pause {
    max: Duration,
    next: Duration,
    until: Option<tokio::time::Instant>,
}

impl Pause {
    pub(super) fn new(max: Duration) -> Self {
        Self {
            max,
            next: FIRST.min(max),
            until: None,
        }
    }

    /// `random` is from 0 to 1.
    pub(super) fn on_failure(&mut self, now: tokio::time::Instant, random: f64) {
        let is_in_row = self
            .until
            .is_some_and(|until| now < until + (2 * self.next).max(QUIET));
        if !is_in_row {
            self.next = FIRST.min(self.max);
        }
        self.until = Some(now + self.next.mul_f64(0.75 + 0.25 * random));
        self.next = (2 * self.next).min(self.max);
    }

    /// When the pause ends, if it is not over.
    pub(super) fn until(&self, now: tokio::time::Instant) -> Option<tokio::time::Instant> {
        self.until.filter(|until| now < *until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_begin_anew_after_quiet() {
        let mut pause = Pause::new(Duration::from_secs(1));
        let mut now = tokio::time::Instant::now();
        let mut length = |now: &mut tokio::time::Instant, quiet| {
            *now += quiet;
            pause.on_failure(*now, 1.0);
            let until = pause.until(*now).unwrap();
            let length = until - *now;
            *now = until;
            assert_eq!(pause.until(*now), None);
            length.as_millis()
        };
        let lengths = [(); 5].map(|()| length(&mut now, Duration::ZERO));
        assert_eq!(lengths, [200, 400, 800, 1_000, 1_000]);
        assert_eq!(length(&mut now, QUIET * 2), 200);
    }
}
