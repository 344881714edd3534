//! When to stop asking Redis, and when to try again: closed, open, half open.

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
    /// One operation is trying, and has until then to tell.
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

/// What a failure came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(super) enum Step {
    Nothing,
    /// It opened now: what is connected is not to be used again.
    Opened,
}

impl Breaker {
    pub(super) fn new(settings: &settings::Breaker) -> Self {
        Self {
            state: State::Closed { failures: 0 },
            failures_max: settings.failures,
            open: Duration::from_millis(settings.open_ms),
        }
    }

    /// Whether an operation may be sent; if not, when to ask again.
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
            // Of operations that were sent before it opened.
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

    /// For the gauge.
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
    fn it_opens_after_failures_in_a_row_and_lets_one_try_at_a_time() {
        let begun = observe::now();
        let at = |ms| begun + Duration::from_millis(ms);
        let mut breaker = Breaker::new(&settings::Breaker {
            failures: 2,
            open_ms: 100,
        });
        assert_eq!(breaker.on_failure(at(0)), Step::Nothing);
        breaker.on_success();
        assert_eq!(breaker.on_failure(at(1)), Step::Nothing);
        assert_eq!(breaker.on_failure(at(2)), Step::Opened);
        // One that was under way.
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
    fn a_try_that_never_tells_does_not_keep_it_shut() {
        let begun = observe::now();
        let mut breaker = Breaker::new(&settings::Breaker {
            failures: 1,
            open_ms: 100,
        });
        assert_eq!(breaker.on_failure(begun), Step::Opened);
        assert_eq!(breaker.admit(begun + Duration::from_millis(100)), Ok(()));
        assert_eq!(breaker.admit(begun + Duration::from_millis(200)), Ok(()));
    }
}
