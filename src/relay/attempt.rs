//! Retry, move on, or too late: what a failed try means. Pure.
//!
//! Only tries that failed before the first byte of an answer come here; after it there is no way back.

use std::time::Duration;

use super::Settings;

/// How a try failed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Failure {
    /// No connection.
    Connect,
    /// The connection broke before the answer.
    Broken,
    /// No answer within the limit.
    TimedOut,
    /// The engine answered that somebody else should be asked.
    Refused { retry_after: Option<Duration> },
    /// What one worker had computed did not get to the other.
    Handoff,
}

impl Failure {
    /// Every value of [`Failure::as_str`].
    pub const REASONS: [&'static str; 5] = ["connect", "broken", "timed_out", "refused", "handoff"];

    pub fn as_str(self) -> &'static str {
        match self {
            Failure::Connect => "connect",
            Failure::Broken => "broken",
            Failure::TimedOut => "timed_out",
            Failure::Refused { .. } => "refused",
            Failure::Handoff => "handoff",
        }
    }
}

#[must_use]
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Step {
    /// Try another worker, after a pause.
    Retry {
        after: Duration,
    },
    GiveUp,
}

/// One request's tries.
#[derive(Debug)]
pub struct Attempts {
    tries: u32,
    tries_max: u32,
    backoff: Duration,
    backoff_max: Duration,
    last: Option<Failure>,
}

impl Attempts {
    pub fn new(settings: &Settings) -> Self {
        Self {
            tries: 0,
            tries_max: settings.attempts_max.max(1),
            backoff: Duration::from_millis(settings.backoff_ms),
            backoff_max: Duration::from_millis(settings.backoff_max_ms),
            last: None,
        }
    }

    pub fn begin(&mut self) {
        self.tries += 1;
    }

    pub fn tries(&self) -> u32 {
        self.tries
    }

    /// `random` is drawn from 0..1 and spreads the pause over 50 % to 100 %.
    pub fn on_failure(&mut self, failure: Failure, random: f64) -> Step {
        self.last = Some(failure);
        if self.tries >= self.tries_max {
            return Step::GiveUp;
        }
        let doublings = self.tries.saturating_sub(1).min(16);
        let full = self
            .backoff
            .saturating_mul(1 << doublings)
            .min(self.backoff_max);
        Step::Retry {
            after: full.mul_f64(0.5 + random.clamp(0.0, 1.0) / 2.0),
        }
    }

    /// Whether the last try did.
    pub fn has_timed_out(&self) -> bool {
        self.last == Some(Failure::TimedOut)
    }

    /// Whether a worker that has failed this request may get it again when there is no other: one
    /// that could not be reached may be restarting, and of two that could not hand over either may be
    /// well; one that refused or kept silent would do it again.
    pub fn may_try_again_where_it_failed(&self) -> bool {
        matches!(
            self.last,
            Some(Failure::Connect | Failure::Broken | Failure::Handoff)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempts(attempts_max: u32) -> Attempts {
        Attempts::new(&Settings {
            attempts_max,
            backoff_ms: 100,
            backoff_max_ms: 300,
            ..Settings::default()
        })
    }

    fn steps(attempts: &mut Attempts, count: usize) -> Vec<Step> {
        (0..count)
            .map(|_| {
                attempts.begin();
                attempts.on_failure(Failure::Connect, 1.0)
            })
            .collect()
    }

    #[test]
    fn pauses_double_up_to_their_bound_and_then_it_gives_up() {
        let retry = |ms| Step::Retry {
            after: Duration::from_millis(ms),
        };
        assert_eq!(
            steps(&mut attempts(5), 5),
            [retry(100), retry(200), retry(300), retry(300), Step::GiveUp]
        );
        assert_eq!(steps(&mut attempts(1), 1), [Step::GiveUp]);
    }

    #[test]
    fn chance_halves_the_pause_at_most() {
        let mut attempts = attempts(3);
        attempts.begin();
        assert_eq!(
            attempts.on_failure(Failure::Broken, 0.0),
            Step::Retry {
                after: Duration::from_millis(50)
            }
        );
    }

    #[test]
    fn only_a_worker_that_was_not_reached_is_asked_again() {
        for (failure, expected) in [
            (Failure::Connect, true),
            (Failure::Broken, true),
            (Failure::Handoff, true),
            (Failure::TimedOut, false),
            (Failure::Refused { retry_after: None }, false),
        ] {
            let mut attempts = attempts(3);
            attempts.begin();
            let _ = attempts.on_failure(failure, 0.5);
            assert_eq!(
                attempts.may_try_again_where_it_failed(),
                expected,
                "{failure:?}"
            );
        }
    }
}
