//! Circuit breaker: results of requests, and of health checks after lost connections -> closed, open, half-open. The
//! machine is pure; [`SharedBreaker`] lets concurrent requests use it without a lock as long as nothing fails.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::observe::metrics::words;

words! {
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum State: Display {
        #[default]
        Closed = "closed",
        /// No request is admitted.
        Open = "open",
        /// One trial request is under way.
        HalfOpen = "half-open",
    }
}

impl State {
    /// The value of a state gauge: 0 closed, 1 half-open, 2 open.
    pub fn number(self) -> u8 {
        match self {
            State::Closed => 0,
            State::HalfOpen => 1,
            State::Open => 2,
        }
    }
}

#[derive(Clone, Debug)]
pub struct CircuitBreaker {
    failure_threshold: u32,
    open_duration: Duration,
    state: State,
    /// In a row: requests that failed at the server, and those that it took no connection for.
    failures: u32,
    unconnected: u32,
    /// When it last took no connection.
    unconnected_at: Option<Instant>,
    /// When the health check began that last closed the breaker.
    closed_by_check_at: Option<Instant>,
    opened_at: Option<Instant>,
    /// When an open breaker admits a trial request, and when a trial request without a result counts as failed.
    retry_at: Option<Instant>,
    /// When the last trial request was admitted.
    trial_at: Option<Instant>,
    /// The server asked for no requests until then (Retry-After).
    paused_until: Option<Instant>,
}

impl CircuitBreaker {
    /// Opens after `failure_threshold` failures in a row, and admits a trial request each `open_duration`.
    pub fn new(failure_threshold: u32, open_duration: Duration) -> Self {
        Self {
            failure_threshold: failure_threshold.max(1),
            open_duration,
            state: State::Closed,
            failures: 0,
            unconnected: 0,
            unconnected_at: None,
            closed_by_check_at: None,
            opened_at: None,
            retry_at: None,
            trial_at: None,
            paused_until: None,
        }
    }

    pub fn set(&mut self, failure_threshold: u32, open_duration: Duration) {
        self.failure_threshold = failure_threshold.max(1);
        self.open_duration = open_duration;
    }

    pub fn state(&self) -> State {
        self.state
    }

    /// When the next request is admitted; none for at once.
    pub fn wait(&self, now: Instant) -> Option<Duration> {
        let opens_at = self.retry_at.filter(|_| self.state != State::Closed);
        let until = opens_at.max(self.paused_until)?;
        (until > now).then(|| until - now)
    }

    /// True if [`CircuitBreaker::admit`] would admit a request now.
    pub fn may_admit(&self, now: Instant) -> bool {
        self.wait(now).is_none()
    }

    /// Admits a request or not. The first one after `open_duration` is the trial request.
    pub fn admit(&mut self, now: Instant) -> bool {
        let admits = self.may_admit(now);
        if self.paused_until.is_some_and(|until| now >= until) {
            self.paused_until = None;
        }
        if admits && self.state != State::Closed {
            self.state = State::HalfOpen;
            self.retry_at = Some(now + self.open_duration);
            self.trial_at = Some(now);
        }
        admits
    }

    /// True if the end of the trial request that was admitted at `admitted_at` says something about the server: it has
    /// not opened since. A trial of an earlier half-open period is as any request from before it opened.
    pub fn counts_trial(&self, admitted_at: Instant) -> bool {
        self.opened_at
            .is_none_or(|opened_at| admitted_at > opened_at)
    }

    /// Takes a request that succeeded. `is_trial`: it was admitted as a trial request that counts
    /// ([`CircuitBreaker::counts_trial`]). Returns true if this closed the breaker.
    pub fn on_success(&mut self, is_trial: bool) -> bool {
        let counts = match self.state {
            State::Closed => true,
            // A request from before the breaker opened says nothing about now, however late it ends.
            State::HalfOpen => is_trial,
            State::Open => false,
        };
        if !counts {
            return false;
        }
        self.failures = 0;
        self.unconnected = 0;
        self.retry_at = None;
        std::mem::replace(&mut self.state, State::Closed) != State::Closed
    }

    /// Takes a request that failed at the server. Returns true if this opened the breaker.
    pub fn on_failure(&mut self, now: Instant) -> bool {
        self.failures = match self.state {
            State::Closed => self.failures.saturating_add(1),
            // Whatever opened the breaker, the server took the trial request and failed.
            State::HalfOpen => self.failures.max(self.failure_threshold),
            // A request from before the breaker opened.
            State::Open => return false,
        };
        self.open_if_due(now)
    }

    /// Takes a request for which the server took no connection. Returns true if this opened the breaker.
    pub fn on_no_connection(&mut self, now: Instant) -> bool {
        if self.state == State::Open {
            // A request from before the breaker opened.
            return false;
        }
        self.unconnected = self.unconnected.saturating_add(1);
        self.unconnected_at = Some(now);
        self.open_if_due(now)
    }

    fn open_if_due(&mut self, now: Instant) -> bool {
        let failures = self.failures.saturating_add(self.unconnected);
        let opens = self.state == State::HalfOpen || failures >= self.failure_threshold;
        if opens {
            self.state = State::Open;
            self.opened_at = Some(now);
            self.retry_at = Some(now + self.open_duration);
        }
        opens
    }

    /// True if the breaker would be closed, had the server taken the connections that it did not take.
    pub fn awaits_connection(&self) -> bool {
        self.state != State::Closed
            && self.unconnected > 0
            && self.failures < self.failure_threshold
    }

    /// Takes a health check that began at `asked_at` and succeeded over a new connection: what a lack of connections has
    /// opened, a connection closes. At most once in `open_duration`, so that a server that takes only some connections is
    /// left alone as others are. Requests that failed at the server still count. Returns true if this closed the breaker.
    pub fn on_health_check(&mut self, asked_at: Instant) -> bool {
        let was_asked_before = self.unconnected_at.is_some_and(|at| asked_at < at);
        let closed_at = self.closed_by_check_at;
        let is_again = closed_at.is_some_and(|at| asked_at < at + self.open_duration);
        if !self.awaits_connection() || was_asked_before || is_again {
            return false;
        }
        self.unconnected = 0;
        self.retry_at = None;
        self.closed_by_check_at = Some(asked_at);
        self.state = State::Closed;
        true
    }

    /// The trial request that was admitted at `admitted_at` has ended. Unless it said something about the server, or
    /// another one is the trial by now, the next request is the trial.
    pub fn release_trial(&mut self, admitted_at: Instant, now: Instant) {
        if self.state == State::HalfOpen && self.trial_at == Some(admitted_at) {
            self.retry_at = Some(now);
        }
    }

    /// Admits no request until then: the server is well and asked for a pause (Retry-After).
    pub fn pause(&mut self, until: Instant) {
        self.paused_until = Some(until);
    }

    /// True if only a failure or a pause could change anything: closed, without failures, not paused.
    fn is_quiet(&self, now: Instant) -> bool {
        self.state == State::Closed
            && self.failures == 0
            && self.unconnected == 0
            && self.paused_until.is_none_or(|until| now >= until)
    }
}

#[derive(Debug)]
pub struct SharedBreaker {
    /// False if the machine is closed, without failures and without a pause: then requests do not take its lock.
    is_active: AtomicBool,
    machine: Mutex<CircuitBreaker>,
}

impl SharedBreaker {
    pub fn new(failure_threshold: u32, open_duration: Duration) -> Self {
        Self {
            is_active: AtomicBool::new(false),
            machine: Mutex::new(CircuitBreaker::new(failure_threshold, open_duration)),
        }
    }

    /// Other settings, from the next failure on; the state stays.
    pub fn set(&self, failure_threshold: u32, open_duration: Duration) {
        self.machine.lock().set(failure_threshold, open_duration);
    }

    pub fn state(&self) -> State {
        if self.is_quiet() {
            State::Closed
        } else {
            self.machine.lock().state()
        }
    }

    #[inline]
    pub fn may_admit(&self, now: Instant) -> bool {
        self.is_quiet() || self.machine.lock().may_admit(now)
    }

    pub fn admit(&self, now: Instant) -> bool {
        self.is_quiet() || self.machine.lock().admit(now)
    }

    /// As [`CircuitBreaker::counts_trial`].
    pub fn counts_trial(&self, admitted_at: Instant) -> bool {
        self.machine.lock().counts_trial(admitted_at)
    }

    /// As [`CircuitBreaker::on_success`].
    pub fn on_success(&self, now: Instant, is_trial: bool) -> bool {
        if self.is_quiet() {
            return false;
        }
        let mut machine = self.machine.lock();
        let closed = machine.on_success(is_trial);
        let is_active = !machine.is_quiet(now);
        self.is_active.store(is_active, Ordering::Release);
        closed
    }

    /// Returns true if this opened the breaker.
    pub fn on_failure(&self, now: Instant) -> bool {
        let mut machine = self.machine.lock();
        self.is_active.store(true, Ordering::Release);
        machine.on_failure(now)
    }

    /// As [`CircuitBreaker::on_no_connection`].
    pub fn on_no_connection(&self, now: Instant) -> bool {
        let mut machine = self.machine.lock();
        self.is_active.store(true, Ordering::Release);
        machine.on_no_connection(now)
    }

    /// As [`CircuitBreaker::awaits_connection`].
    pub fn awaits_connection(&self) -> bool {
        !self.is_quiet() && self.machine.lock().awaits_connection()
    }

    /// As [`CircuitBreaker::on_health_check`].
    pub fn on_health_check(&self, asked_at: Instant) -> bool {
        let mut machine = self.machine.lock();
        let closed = machine.on_health_check(asked_at);
        let is_active = !machine.is_quiet(asked_at);
        self.is_active.store(is_active, Ordering::Release);
        closed
    }

    /// As [`CircuitBreaker::release_trial`].
    pub fn release_trial(&self, admitted_at: Instant, now: Instant) {
        self.machine.lock().release_trial(admitted_at, now);
    }

    pub fn pause(&self, until: Instant) {
        self.machine.lock().pause(until);
        self.is_active.store(true, Ordering::Release);
    }

    fn is_quiet(&self) -> bool {
        !self.is_active.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::observe;

    fn breaker() -> (CircuitBreaker, Instant) {
        (
            CircuitBreaker::new(3, Duration::from_secs(1)),
            observe::now(),
        )
    }

    #[test]
    fn only_failures_in_a_row_open_it() {
        let (mut breaker, now) = breaker();
        breaker.on_failure(now);
        breaker.on_failure(now);
        breaker.on_success(false);
        breaker.on_failure(now);
        breaker.on_failure(now);
        assert_eq!(breaker.state(), State::Closed);
        breaker.on_failure(now);
        assert_eq!(breaker.state(), State::Open);
        assert!(!breaker.admit(now));
    }

    #[test]
    fn an_answer_from_before_it_opened_closes_it_neither_open_nor_half_open() {
        let (mut breaker, now) = breaker();
        (0..3).for_each(|_| _ = breaker.on_failure(now));
        assert!(!breaker.on_success(false));
        assert_eq!(breaker.state(), State::Open);
        let later = now + Duration::from_secs(1);
        assert!(breaker.admit(later));
        assert!(!breaker.on_success(false));
        assert_eq!(breaker.state(), State::HalfOpen);
        assert!(!breaker.admit(later));
        assert!(breaker.on_success(true));
        assert_eq!(breaker.state(), State::Closed);
    }

    #[test]
    fn once_open_duration_is_over_one_request_tries() {
        let (mut breaker, now) = breaker();
        (0..3).for_each(|_| _ = breaker.on_failure(now));
        let later = now + Duration::from_secs(1);
        assert!(breaker.admit(later));
        assert_eq!(breaker.state(), State::HalfOpen);
        assert!(!breaker.admit(later));
        breaker.on_failure(later);
        assert!(!breaker.admit(later));
        let later = later + Duration::from_secs(1);
        assert!(breaker.admit(later));
        breaker.on_success(true);
        assert_eq!(breaker.state(), State::Closed);
    }

    #[test]
    fn a_trial_request_that_never_ends_does_not_keep_the_breaker_open() {
        let (mut breaker, now) = breaker();
        (0..3).for_each(|_| _ = breaker.on_failure(now));
        assert!(breaker.admit(now + Duration::from_secs(1)));
        assert!(breaker.admit(now + Duration::from_secs(2)));
        // It may still end well.
        assert!(breaker.on_success(true));
    }

    #[test]
    fn a_trial_of_an_earlier_half_open_period_counts_no_more() {
        let (mut breaker, now) = breaker();
        (0..3).for_each(|_| _ = breaker.on_failure(now));
        assert!(!breaker.counts_trial(now), "sent before");
        let at = |seconds| now + Duration::from_secs(seconds);
        let (first, second, third) = (at(1), at(2), at(4));
        assert!(breaker.admit(first) && breaker.admit(second));
        // Each of the two may be the one that shows how the server is.
        assert!(breaker.counts_trial(first) && breaker.counts_trial(second));
        assert!(breaker.on_failure(at(3)));
        assert!(breaker.admit(third));
        let counted = [first, second, third].map(|trial| breaker.counts_trial(trial));
        assert_eq!(counted, [false, false, true]);
        assert!(!breaker.on_success(breaker.counts_trial(first)));
        assert!(breaker.on_success(breaker.counts_trial(third)));
        // A breaker that has never opened has no trials.
        assert!(self::breaker().0.counts_trial(now));
    }

    #[test]
    fn a_trial_that_ends_late_gives_back_no_place_but_its_own() {
        let (mut breaker, now) = breaker();
        (0..3).for_each(|_| _ = breaker.on_failure(now));
        let (first, second) = (now + Duration::from_secs(1), now + Duration::from_secs(2));
        assert!(breaker.admit(first) && breaker.admit(second));
        breaker.release_trial(first, second);
        assert!(!breaker.admit(second), "the second one is the trial");
        breaker.release_trial(second, second);
        assert!(breaker.admit(second));
    }

    #[test]
    fn a_trial_with_a_result_gives_back_nothing() {
        for is_success in [false, true] {
            let (mut breaker, now) = breaker();
            (0..3).for_each(|_| _ = breaker.on_failure(now));
            let later = now + Duration::from_secs(1);
            assert!(breaker.admit(later));
            if is_success {
                breaker.on_success(true);
            } else {
                breaker.on_failure(later);
            }
            breaker.release_trial(later, later);
            assert_eq!(breaker.admit(later), is_success);
        }
    }

    #[test]
    fn a_worker_that_asked_for_a_pause_gets_it() {
        let (mut breaker, now) = breaker();
        breaker.pause(now + Duration::from_secs(2));
        breaker.on_success(false);
        assert!(!breaker.admit(now + Duration::from_secs(1)));
        assert_eq!(breaker.state(), State::Closed);
        assert!(breaker.admit(now + Duration::from_secs(2)));
    }

    #[test]
    fn a_success_does_not_end_a_pause() {
        let now = observe::now();
        let shared = SharedBreaker::new(3, Duration::from_secs(5));
        shared.pause(now + Duration::from_secs(2));
        shared.on_success(now, false);
        assert!(!shared.may_admit(now));
        shared.on_success(now + Duration::from_secs(2), false);
        assert!(shared.is_quiet());
    }

    /// Each letter is a request: `-` fails, `0` gets no connection, `+` succeeds; `t` admits the next one as a trial. Then
    /// a health check succeeds.
    fn check_after(requests: &str, expected: (bool, State)) {
        let (mut breaker, mut now) = breaker();
        for request in requests.chars() {
            match request {
                '-' => {
                    breaker.on_failure(now);
                }
                '0' => {
                    breaker.on_no_connection(now);
                }
                '+' => {
                    breaker.on_success(true);
                }
                't' => {
                    now += Duration::from_secs(1);
                    assert!(breaker.admit(now), "{requests}");
                }
                other => panic!("{other}"),
            }
        }
        let awaits = breaker.awaits_connection();
        let closed = breaker.on_health_check(now);
        assert_eq!((closed, breaker.state()), expected, "{requests}");
        assert_eq!(closed, awaits, "{requests}");
    }

    #[test]
    fn a_health_check_closes_what_opened_for_lack_of_a_connection() {
        for requests in ["000", "-00", "0-0", "--0", "000t", "000t0", "---t+000"] {
            check_after(requests, (true, State::Closed));
        }
        // What fails while it is open says nothing.
        check_after("00---", (true, State::Closed));
        for requests in ["---", "---0", "---t0", "0-0t-", "000t-"] {
            check_after(requests, (false, State::Open));
        }
        check_after("---t", (false, State::HalfOpen));
        check_after("00", (false, State::Closed));
    }

    #[test]
    fn a_health_check_that_began_before_the_last_lost_connection_closes_nothing() {
        let (mut breaker, now) = breaker();
        let later = now + Duration::from_millis(1);
        (0..3).for_each(|_| _ = breaker.on_no_connection(later));
        assert!(!breaker.on_health_check(now));
        assert!(!breaker.may_admit(later));
        assert!(breaker.on_health_check(later));
        assert!(breaker.may_admit(later));
    }

    #[test]
    fn failures_of_before_still_count_after_a_health_check_has_closed_it() {
        let (mut breaker, now) = breaker();
        (0..2).for_each(|_| _ = breaker.on_failure(now));
        assert!(breaker.on_no_connection(now));
        assert!(breaker.on_health_check(now));
        assert!(breaker.on_failure(now));
        assert!(!breaker.on_health_check(now));
    }

    #[test]
    fn a_server_that_takes_only_some_connections_is_tried_as_seldom_as_others() {
        let (mut breaker, now) = breaker();
        for (ms, expected) in [(0, true), (400, false), (999, false), (1_000, true)] {
            let now = now + Duration::from_millis(ms);
            (0..3).for_each(|_| _ = breaker.on_no_connection(now));
            assert_eq!(breaker.on_health_check(now), expected, "{ms}");
        }
    }

    #[test]
    fn requests_take_no_lock_once_a_health_check_has_closed_it() {
        let (now, shared) = (
            observe::now(),
            SharedBreaker::new(1, Duration::from_secs(1)),
        );
        assert!(shared.on_no_connection(now));
        assert!(shared.awaits_connection());
        assert!(shared.on_health_check(now));
        assert!(shared.is_quiet());
        assert!(!shared.awaits_connection());
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Wait(u64),
        Admit,
        Success { is_trial: bool },
        Release,
        Failure,
        NoConnection,
        HealthCheck,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (0u64..1500).prop_map(Step::Wait),
            Just(Step::Admit),
            any::<bool>().prop_map(|is_trial| Step::Success { is_trial }),
            Just(Step::Release),
            Just(Step::Failure),
            Just(Step::NoConnection),
            Just(Step::HealthCheck)
        ];
        proptest::collection::vec(step, 0..80)
    }

    proptest! {
        /// In any order of requests and results: the shared breaker agrees with the machine, and an open breaker
        /// admits nothing before `open_duration` is over and then one request.
        #[test]
        fn an_open_breaker_admits_at_most_one_request_in_open_duration(steps in steps()) {
            let open = Duration::from_secs(1);
            let (mut machine, shared) = (CircuitBreaker::new(2, open), SharedBreaker::new(2, open));
            let mut now = observe::now();
            let (mut quiet_until, mut trial_at) = (None, None);
            for step in steps {
                match step {
                    Step::Wait(ms) => now += Duration::from_millis(ms),
                    Step::Admit => {
                        let was_closed = machine.state() == State::Closed;
                        let may = machine.may_admit(now);
                        let admitted = machine.admit(now);
                        prop_assert_eq!(may, admitted);
                        prop_assert_eq!(shared.admit(now), admitted);
                        if !was_closed && admitted {
                            prop_assert!(quiet_until.is_none_or(|until| now >= until));
                            quiet_until = Some(now + Duration::from_secs(1));
                            trial_at = Some(now);
                        }
                    }
                    Step::Success { is_trial } => {
                        let before = machine.state();
                        let closed = machine.on_success(is_trial);
                        prop_assert_eq!(closed, shared.on_success(now, is_trial));
                        prop_assert_eq!(closed, before == State::HalfOpen && is_trial);
                        if closed { quiet_until = None; }
                    }
                    Step::Release => {
                        let Some(admitted_at) = trial_at.take() else { continue };
                        let was_half_open = machine.state() == State::HalfOpen;
                        machine.release_trial(admitted_at, now);
                        shared.release_trial(admitted_at, now);
                        if was_half_open { quiet_until = None; }
                    }
                    Step::Failure => {
                        let opened = machine.on_failure(now);
                        prop_assert_eq!(opened, shared.on_failure(now));
                        if opened {
                            quiet_until = Some(now + Duration::from_secs(1));
                        }
                    }
                    Step::NoConnection => {
                        let opened = machine.on_no_connection(now);
                        prop_assert_eq!(opened, shared.on_no_connection(now));
                        if opened {
                            quiet_until = Some(now + Duration::from_secs(1));
                        }
                    }
                    Step::HealthCheck => {
                        prop_assert_eq!(machine.awaits_connection(), shared.awaits_connection());
                        let closed = machine.on_health_check(now);
                        prop_assert_eq!(closed, shared.on_health_check(now));
                        if closed {
                            quiet_until = None;
                        }
                    }
                }
                prop_assert_eq!(machine.state(), shared.state());
                if let Some(admitted_at) = trial_at {
                    let counts = machine.counts_trial(admitted_at);
                    prop_assert_eq!(counts, shared.counts_trial(admitted_at));
                    // The last trial counts for as long as it may end the half-open period.
                    prop_assert!(counts || machine.state() != State::HalfOpen);
                }
            }
        }
    }
}
