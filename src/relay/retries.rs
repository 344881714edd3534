//! Whether a failed attempt is retried, and when. Pure.
//!
//! Only attempts that failed before the first byte of an answer are retried.

use std::time::Duration;

use super::settings::Settings;

/// How an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Failure {
    /// No connection to the worker.
    Connect,
    /// The connection broke before the answer.
    Broken,
    /// No answer within the limit.
    TimedOut,
    /// The engine answered with a retryable status (503, ...).
    Refused,
    /// The KV transfer from the prefill to the decode worker failed.
    KvTransfer,
}

impl Failure {
    /// Every value of [`Failure::as_str`].
    pub const REASONS: [&'static str; 5] = [
        "connect",
        "connection_lost",
        "timeout",
        "refused",
        "kv_transfer",
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Failure::Connect => "connect",
            Failure::Broken => "connection_lost",
            Failure::TimedOut => "timeout",
            Failure::Refused => "refused",
            Failure::KvTransfer => "kv_transfer",
        }
    }
}

#[must_use]
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Step {
    /// Try a worker again after a pause.
    Retry {
        after: Duration,
    },
    GiveUp,
}

/// One request's attempts.
#[derive(Debug)]
pub struct Attempts {
    count: u32,
    count_max: u32,
    backoff: Duration,
    backoff_max: Duration,
    last: Option<Failure>,
}

impl Attempts {
    pub fn new(settings: &Settings) -> Self {
        Self {
            count: 0,
            count_max: settings.max_attempts.max(1),
            backoff: settings.advanced.backoff,
            backoff_max: settings.advanced.max_backoff,
            last: None,
        }
    }

    pub fn begin(&mut self) {
        self.count += 1;
    }

    pub fn count(&self) -> u32 {
        self.count
    }

    /// `random` from 0 to 1 spreads the pause over 50 % to 100 % of the backoff.
    pub fn on_failure(&mut self, failure: Failure, random: f64) -> Step {
        self.last = Some(failure);
        if self.count >= self.count_max {
            return Step::GiveUp;
        }
        let doublings = self.count.saturating_sub(1).min(16);
        let full = self
            .backoff
            .saturating_mul(1 << doublings)
            .min(self.backoff_max);
        Step::Retry {
            after: full.mul_f64(0.5 + random.clamp(0.0, 1.0) / 2.0),
        }
    }

    /// True if the last attempt timed out.
    pub fn has_timed_out(&self) -> bool {
        self.last == Some(Failure::TimedOut)
    }

    /// True if a worker that failed this request may get it again when there is no other: an unreachable worker may
    /// be restarting, and after a failed KV transfer either worker may be healthy. A worker that refused or timed out
    /// would do so again.
    pub fn may_repeat_worker(&self) -> bool {
        matches!(
            self.last,
            Some(Failure::Connect | Failure::Broken | Failure::KvTransfer)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::settings::Retries;

    fn attempts(max_attempts: u32) -> Attempts {
        Attempts::new(&Settings {
            max_attempts,
            advanced: Retries {
                backoff: Duration::from_millis(100),
                max_backoff: Duration::from_millis(300),
                ..Retries::default()
            },
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
    fn the_backoff_doubles_up_to_its_bound_until_the_attempts_are_used_up() {
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
    fn jitter_halves_the_backoff_at_most() {
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
    fn only_an_unreachable_worker_may_get_the_request_again() {
        for (failure, expected) in [
            (Failure::Connect, true),
            (Failure::Broken, true),
            (Failure::KvTransfer, true),
            (Failure::TimedOut, false),
            (Failure::Refused, false),
        ] {
            let mut attempts = attempts(3);
            attempts.begin();
            let _ = attempts.on_failure(failure, 0.5);
            assert_eq!(attempts.may_repeat_worker(), expected, "{failure:?}");
        }
    }
}
