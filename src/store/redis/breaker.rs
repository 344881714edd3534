//! The circuit breaker of Redis: closed, open, half-open.

use std::time::{Duration, Instant};

use super::settings;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Closed {
        failures: u32,
    },
    Open {
        until: Instant,
    },
    /// One trial operation is running. Another one is admitted at `until` if it has not reported by then.
    HalfOpen {
        until: Instant,
    },
}

#[derive(Clone, Debug)]
pub(super) struct Breaker {
    state: State,
    failures_max: u32,
    open: Duration,
}

/// The effect of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(super) enum Step {
    Nothing,
    /// The circuit breaker opened now: drop all connections.
    Opened,
}

impl Breaker {
    pub(super) fn new(settings: &settings::CircuitBreaker) -> Self {
        Self {
            state: State::Closed { failures: 0 },
            failures_max: settings.failure_threshold,
            open: settings.open_duration,
        }
    }

    /// Whether an operation may be sent; if not, when to retry.
    pub(super) fn admit(&mut self, now: Instant) -> Result<(), Duration> {
        match self.state {
            State::Closed { .. } => Ok(()),
            State::Open { until } | State::HalfOpen { until } if now < until => Err(until - now),
            State::Open { .. } | State::HalfOpen { .. } => {
                self.state = State::HalfOpen {
                    until: now + self.open,
                };
                Ok(())
            }
        }
    }

    pub(super) fn on_success(&mut self) {
        self.state = State::Closed { failures: 0 };
    }

    pub(super) fn on_failure(&mut self, now: Instant) -> Step {
        let until = now + self.open;
        let (state, step) = match self.state {
            State::Closed { failures } if failures + 1 < self.failures_max => {
                let failures = failures + 1;
                (State::Closed { failures }, Step::Nothing)
            }
            State::Closed { .. } => (State::Open { until }, Step::Opened),
            State::HalfOpen { .. } => (State::Open { until }, Step::Opened),
            // An operation that was sent before it opened.
            open @ State::Open { .. } => (open, Step::Nothing),
        };
        self.state = state;
        step
    }

    pub(super) fn state(&self) -> State {
        self.state
    }
}

impl State {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Closed { .. } => "closed",
            Self::HalfOpen { .. } => "half_open",
            Self::Open { .. } => "open",
        }
    }

    /// The value of the metric.
    pub(super) fn number(self) -> i64 {
        match self {
            Self::Closed { .. } => 0,
            Self::HalfOpen { .. } => 1,
            Self::Open { .. } => 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;

    #[test]
    fn opens_after_consecutive_failures_and_admits_one_trial_at_a_time() {
        let begun = observe::now();
        let at = |ms| begun + Duration::from_millis(ms);
        let mut breaker = Breaker::new(&settings::CircuitBreaker {
            failure_threshold: 2,
            open_duration: Duration::from_millis(100),
        });
        assert_eq!(breaker.on_failure(at(0)), Step::Nothing);
        breaker.on_success();
        assert_eq!(breaker.on_failure(at(1)), Step::Nothing);
        assert_eq!(breaker.on_failure(at(2)), Step::Opened);
        // An operation that was sent before.
        assert_eq!(breaker.on_failure(at(3)), Step::Nothing);
        assert_eq!(breaker.admit(at(52)), Err(Duration::from_millis(50)));
        assert_eq!(breaker.admit(at(102)), Ok(()));
        assert!(breaker.admit(at(103)).is_err());
        assert_eq!(breaker.on_failure(at(104)), Step::Opened);
        assert_eq!(breaker.admit(at(204)), Ok(()));
        breaker.on_success();
        assert_eq!(breaker.admit(at(205)), Ok(()));
    }

    #[test]
    fn a_trial_that_never_reports_does_not_keep_it_open() {
        let begun = observe::now();
        let mut breaker = Breaker::new(&settings::CircuitBreaker {
            failure_threshold: 1,
            open_duration: Duration::from_millis(100),
        });
        assert_eq!(breaker.on_failure(begun), Step::Opened);
        assert_eq!(breaker.admit(begun + Duration::from_millis(100)), Ok(()));
        assert_eq!(breaker.admit(begun + Duration::from_millis(200)), Ok(()));
    }
}
