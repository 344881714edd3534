//! A circuit breaker of Redis: the machine of `http::circuit_breaker`, shared by all operations on one server.
//!
//! Any reply of Redis closes this breaker, also a reply to an operation that was sent before it opened: Redis is one
//! server, and a reply shows that it works.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::settings;
use crate::http::circuit_breaker::{self, State};

#[derive(Debug)]
pub(super) struct RedisBreaker {
    settings: settings::CircuitBreaker,
    machine: Mutex<circuit_breaker::CircuitBreaker>,
    /// True if nothing has failed since the last reply. Then no operation locks the machine.
    is_healthy: AtomicBool,
}

fn closed(settings: &settings::CircuitBreaker) -> circuit_breaker::CircuitBreaker {
    circuit_breaker::CircuitBreaker::new(settings.failure_threshold, settings.open_duration)
}

impl RedisBreaker {
    pub(super) fn new(settings: &settings::CircuitBreaker) -> Self {
        Self {
            settings: settings.clone(),
            machine: Mutex::new(closed(settings)),
            is_healthy: AtomicBool::new(true),
        }
    }

    pub(super) fn is_healthy(&self) -> bool {
        self.is_healthy.load(Acquire)
    }

    pub(super) fn state(&self) -> State {
        self.machine.lock().state()
    }

    /// Whether an operation may be sent; if not, when to retry.
    pub(super) fn admit(&self, now: Instant) -> Result<(), Duration> {
        if self.is_healthy() {
            return Ok(());
        }
        let mut machine = self.machine.lock();
        if let Some(wait) = machine.wait(now) {
            return Err(wait);
        }
        machine.admit(now);
        Ok(())
    }

    /// Returns true if this closed the breaker.
    pub(super) fn on_success(&self) -> bool {
        if self.is_healthy() {
            return false;
        }
        let mut machine = self.machine.lock();
        let before = std::mem::replace(&mut *machine, closed(&self.settings));
        self.is_healthy.store(true, Release);
        before.state() != State::Closed
    }

    /// An operation failed for which so many waited; one for which nobody waits any more counts too. If this opened the
    /// breaker, returns its state before: half-open if a trial operation failed. The caller then drops all connections.
    pub(super) fn on_failure(&self, waiting: usize, now: Instant) -> Option<State> {
        let mut machine = self.machine.lock();
        self.is_healthy.store(false, Release);
        let before = machine.state();
        // More than open it change nothing.
        let threshold = self.settings.failure_threshold.max(1) as usize;
        let opened = (0..waiting.clamp(1, threshold)).any(|_| machine.on_failure(now));
        opened.then_some(before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;

    fn breaker(failure_threshold: u32) -> RedisBreaker {
        let settings = settings::CircuitBreaker {
            failure_threshold,
            open_duration: Duration::from_millis(100),
        };
        RedisBreaker::new(&settings)
    }

    #[test]
    fn opens_after_consecutive_failures_and_admits_one_trial_at_a_time() {
        let started = observe::now();
        let at = |ms| started + Duration::from_millis(ms);
        let breaker = breaker(2);
        assert_eq!(breaker.on_failure(1, at(0)), None);
        assert!(!breaker.on_success());
        assert_eq!(breaker.on_failure(1, at(1)), None);
        assert_eq!(breaker.on_failure(1, at(2)), Some(State::Closed));
        // An operation that was sent before.
        assert_eq!(breaker.on_failure(1, at(3)), None);
        assert_eq!(breaker.admit(at(52)), Err(Duration::from_millis(50)));
        assert_eq!(breaker.admit(at(102)), Ok(()));
        assert!(breaker.admit(at(103)).is_err());
        assert_eq!(breaker.on_failure(1, at(104)), Some(State::HalfOpen));
        assert_eq!(breaker.admit(at(204)), Ok(()));
        assert!(breaker.on_success());
        assert_eq!(breaker.admit(at(205)), Ok(()));
    }

    #[test]
    fn a_failure_counts_for_each_that_waited_and_at_least_once() {
        let now = observe::now();
        let breaker = breaker(5);
        assert_eq!(breaker.on_failure(4, now), None);
        assert_eq!(breaker.on_failure(0, now), Some(State::Closed));
        assert_eq!(breaker.on_failure(9_999, now), None);
        assert!(breaker.on_success());
        assert_eq!(breaker.on_failure(9_999, now), Some(State::Closed));
    }

    #[test]
    fn a_trial_that_never_reports_does_not_keep_it_open() {
        let started = observe::now();
        let breaker = breaker(1);
        assert!(breaker.on_failure(1, started).is_some());
        assert_eq!(breaker.admit(started + Duration::from_millis(100)), Ok(()));
        assert_eq!(breaker.admit(started + Duration::from_millis(200)), Ok(()));
    }

    #[test]
    fn a_reply_to_an_operation_from_before_it_opened_closes_it() {
        let now = observe::now();
        let breaker = breaker(1);
        assert!(breaker.on_failure(1, now).is_some());
        assert!(breaker.on_success());
        assert_eq!(breaker.state(), State::Closed);
        assert_eq!(breaker.admit(now), Ok(()));
    }
}
