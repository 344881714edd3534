//! Request outcomes -> closed, open, probing. The machine is pure; `SharedBreaker` lets requests
//! share it without touching its lock while all is well.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// Failed requests in a row until a worker gets no more.
    pub failures: u32,
    /// How long until one request may try again.
    pub open_ms: u64,
}

impl Default for Settings {
    fn default() -> Self {
        // Two failures may be one hiccup that two requests met; three are a state.
        Self {
            failures: 3,
            open_ms: 5_000,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    Closed,
    /// No requests.
    Open,
    /// One request is out to see whether the worker answers again.
    Probing,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            State::Closed => "closed",
            State::Open => "open",
            State::Probing => "probing",
        })
    }
}

/// One worker's breaker.
#[derive(Debug)]
pub struct Breaker {
    settings: Settings,
    state: State,
    failures: u32,
    /// When an open breaker lets a request try, or a probe that never ended counts as lost.
    until: Option<Instant>,
    /// The worker asked to be left alone until then.
    held_until: Option<Instant>,
}

impl Breaker {
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            state: State::Closed,
            failures: 0,
            until: None,
            held_until: None,
        }
    }

    pub fn state(&self) -> State {
        self.state
    }

    /// Whether a request may go to the worker now. Changes nothing.
    pub fn may_pass(&self, now: Instant) -> bool {
        if self.held_until.is_some_and(|until| now < until) {
            return false;
        }
        match self.state {
            State::Closed => true,
            State::Open | State::Probing => self.until.is_none_or(|until| now >= until),
        }
    }

    /// Lets a request pass, or not. The first one after the pause is the probe.
    pub fn pass(&mut self, now: Instant) -> bool {
        let passes = self.may_pass(now);
        if self.held_until.is_some_and(|until| now >= until) {
            self.held_until = None;
        }
        if passes && self.state != State::Closed {
            self.state = State::Probing;
            self.until = Some(now + self.pause());
        }
        passes
    }

    pub fn on_success(&mut self) {
        if self.state == State::Open {
            // A request from before the breaker opened: it says nothing of now.
            return;
        }
        self.state = State::Closed;
        self.failures = 0;
        self.until = None;
    }

    /// Whether anything but success would be news: closed, without failures, not held.
    fn is_settled(&self, now: Instant) -> bool {
        self.state == State::Closed
            && self.failures == 0
            && self.held_until.is_none_or(|until| now >= until)
    }

    /// The worker is well, and asked for a pause (Retry-After).
    pub fn hold(&mut self, until: Instant) {
        self.held_until = Some(until);
    }

    /// Counts one failed request; a worker that restarts meets each request's failure once.
    pub fn on_failure(&mut self, now: Instant) {
        self.failures = self.failures.saturating_add(1);
        let opens = match self.state {
            State::Closed => self.failures >= self.settings.failures.max(1),
            State::Probing => true,
            // A request from before the breaker opened.
            State::Open => false,
        };
        if opens {
            self.state = State::Open;
            self.until = Some(now + self.pause());
        }
    }

    fn pause(&self) -> Duration {
        Duration::from_millis(self.settings.open_ms)
    }
}

/// A breaker that requests share.
#[derive(Debug)]
pub struct SharedBreaker {
    /// Whether the machine is anything but closed without failures or a pause.
    troubled: AtomicBool,
    machine: Mutex<Breaker>,
}

impl SharedBreaker {
    pub fn new(settings: Settings) -> Self {
        Self {
            troubled: AtomicBool::new(false),
            machine: Mutex::new(Breaker::new(settings)),
        }
    }

    pub fn state(&self) -> State {
        if self.is_troubled() {
            self.machine.lock().state()
        } else {
            State::Closed
        }
    }

    pub fn may_pass(&self, now: Instant) -> bool {
        !self.is_troubled() || self.machine.lock().may_pass(now)
    }

    pub fn pass(&self, now: Instant) -> bool {
        !self.is_troubled() || self.machine.lock().pass(now)
    }

    /// Returns whether this closed the breaker.
    pub fn on_success(&self, now: Instant) -> bool {
        if !self.is_troubled() {
            return false;
        }
        let mut machine = self.machine.lock();
        let was = machine.state();
        machine.on_success();
        self.troubled
            .store(!machine.is_settled(now), Ordering::Release);
        was != State::Closed && machine.state() == State::Closed
    }

    /// Returns whether this opened the breaker.
    pub fn on_failure(&self, now: Instant) -> bool {
        let mut machine = self.machine.lock();
        let was = machine.state();
        machine.on_failure(now);
        self.troubled.store(true, Ordering::Release);
        was != State::Open && machine.state() == State::Open
    }

    pub fn hold(&self, until: Instant) {
        self.machine.lock().hold(until);
        self.troubled.store(true, Ordering::Release);
    }

    fn is_troubled(&self) -> bool {
        self.troubled.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::observe;

    fn breaker() -> (Breaker, Instant) {
        (
            Breaker::new(Settings {
                failures: 3,
                open_ms: 1_000,
            }),
            observe::now(),
        )
    }

    #[test]
    fn failures_in_a_row_open_it_and_a_success_between_them_does_not_let_them() {
        let (mut breaker, now) = breaker();
        breaker.on_failure(now);
        breaker.on_failure(now);
        breaker.on_success();
        breaker.on_failure(now);
        breaker.on_failure(now);
        assert_eq!(breaker.state(), State::Closed);
        breaker.on_failure(now);
        assert_eq!(breaker.state(), State::Open);
        assert!(!breaker.pass(now));
    }

    #[test]
    fn an_answer_from_before_it_opened_does_not_close_it() {
        let (mut breaker, now) = breaker();
        (0..3).for_each(|_| breaker.on_failure(now));
        breaker.on_success();
        assert_eq!(breaker.state(), State::Open);
    }

    #[test]
    fn after_the_pause_one_request_tries() {
        let (mut breaker, now) = breaker();
        (0..3).for_each(|_| breaker.on_failure(now));
        let later = now + Duration::from_secs(1);
        assert!(breaker.pass(later));
        assert_eq!(breaker.state(), State::Probing);
        assert!(!breaker.pass(later));
        breaker.on_failure(later);
        assert!(!breaker.pass(later));
        let later = later + Duration::from_secs(1);
        assert!(breaker.pass(later));
        breaker.on_success();
        assert_eq!(breaker.state(), State::Closed);
    }

    #[test]
    fn a_probe_that_never_ends_does_not_keep_the_worker_out() {
        let (mut breaker, now) = breaker();
        (0..3).for_each(|_| breaker.on_failure(now));
        assert!(breaker.pass(now + Duration::from_secs(1)));
        assert!(breaker.pass(now + Duration::from_secs(2)));
    }

    #[test]
    fn a_worker_that_asked_for_a_pause_gets_it() {
        let (mut breaker, now) = breaker();
        breaker.hold(now + Duration::from_secs(2));
        breaker.on_success();
        assert!(!breaker.pass(now + Duration::from_secs(1)));
        assert_eq!(breaker.state(), State::Closed);
        assert!(breaker.pass(now + Duration::from_secs(2)));
    }

    #[test]
    fn an_answer_from_before_does_not_end_a_pause() {
        let now = observe::now();
        let shared = SharedBreaker::new(Settings::default());
        shared.hold(now + Duration::from_secs(2));
        shared.on_success(now);
        assert!(!shared.may_pass(now));
        shared.on_success(now + Duration::from_secs(2));
        assert!(!shared.is_troubled());
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Wait(u64),
        Pass,
        Success,
        Failure,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (0u64..1500).prop_map(Step::Wait),
            Just(Step::Pass),
            Just(Step::Success),
            Just(Step::Failure)
        ];
        proptest::collection::vec(step, 0..80)
    }

    proptest! {
        /// However outcomes and requests interleave: the shared one agrees with the machine, an
        /// open breaker passes nothing within its pause, and at most one request a pause passes.
        #[test]
        fn an_open_breaker_passes_at_most_one_request_a_pause(steps in steps()) {
            let settings = Settings { failures: 2, open_ms: 1_000 };
            let (mut machine, shared) = (Breaker::new(settings.clone()), SharedBreaker::new(settings));
            let mut now = observe::now();
            let mut quiet_until = None;
            for step in steps {
                match step {
                    Step::Wait(ms) => now += Duration::from_millis(ms),
                    Step::Pass => {
                        let was_closed = machine.state() == State::Closed;
                        let may = machine.may_pass(now);
                        let passed = machine.pass(now);
                        prop_assert_eq!(may, passed);
                        prop_assert_eq!(shared.pass(now), passed);
                        if !was_closed && passed {
                            prop_assert!(quiet_until.is_none_or(|until| now >= until));
                            quiet_until = Some(now + Duration::from_secs(1));
                        }
                    }
                    Step::Success => {
                        if machine.state() != State::Open { quiet_until = None; }
                        machine.on_success();
                        shared.on_success(now);
                    }
                    Step::Failure => {
                        let was = machine.state();
                        machine.on_failure(now);
                        shared.on_failure(now);
                        if was != State::Open && machine.state() == State::Open {
                            quiet_until = Some(now + Duration::from_secs(1));
                        }
                    }
                }
                prop_assert_eq!(machine.state(), shared.state());
            }
        }
    }
}
