//! Whether this replica may still run what it owns.
//!
//! The store's clock ends a lease, ours must end it no later: it counts from before the beat was
//! sent. An owner that could not renew in time stops all it runs, since another may run it now.

use std::time::Duration;
use std::time::Instant;

use serde::Deserialize;
use serde::Serialize;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// How long an owner that stopped beating is waited for.
    pub lease_ms: u64,
    pub beat_ms: u64,
    /// Between two looks for what dead owners left.
    pub sweep_ms: u64,
}

impl Default for Settings {
    fn default() -> Self {
        // A dead owner's work is settled within lease + sweep, well below 20 s. Three beats fit into a
        // lease, so that one lost is none missed.
        Self {
            lease_ms: 10_000,
            beat_ms: 3_000,
            sweep_ms: 2_000,
        }
    }
}

/// What the owner does now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Step {
    /// Sends a beat.
    Beat,
    /// Drops everything it runs in the background. Told once for each loss.
    Stop,
    /// Nothing until [`Lease::next_timeout`].
    Wait,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// May run until then.
    Held { until: Instant },
    /// May run nothing until a beat was answered.
    Lost,
}

/// One owner's lease, as it knows of it.
#[derive(Clone, Debug)]
pub struct Lease {
    state: State,
    lease: Duration,
    beat: Duration,
    /// When the next beat is due.
    due: Instant,
    /// When the beat that is under way was sent.
    sent: Option<Instant>,
}

impl Lease {
    /// Not held until the first beat was answered.
    pub fn new(now: Instant, settings: &Settings) -> Self {
        Self {
            state: State::Lost,
            lease: Duration::from_millis(settings.lease_ms),
            beat: Duration::from_millis(settings.beat_ms),
            due: now,
            sent: None,
        }
    }

    /// Whether background work may go on, and begin.
    pub fn is_held(&self, now: Instant) -> bool {
        matches!(self.state, State::Held { until } if now < until)
    }

    pub fn on_timeout(&mut self, now: Instant) -> Step {
        if let State::Held { until } = self.state
            && until <= now
        {
            self.state = State::Lost;
            return Step::Stop;
        }
        if self.sent.is_none() && self.due <= now {
            self.sent = Some(now);
            return Step::Beat;
        }
        Step::Wait
    }

    /// The beat was answered. It counts from when it was sent; an answer that comes after that is over
    /// is worth nothing.
    pub fn on_beat(&mut self, now: Instant) -> Step {
        let Some(sent) = self.sent.take() else {
            return Step::Wait;
        };
        self.due = sent + self.beat;
        let was_held = self.is_held(now);
        let was_lost = matches!(self.state, State::Lost);
        let until = sent + self.lease;
        if until <= now {
            return self.on_timeout(now);
        }
        self.state = State::Held { until };
        // It ran out before this answer came, and nobody has looked since: somebody may have taken over.
        if was_held || was_lost {
            Step::Wait
        } else {
            Step::Stop
        }
    }

    /// The beat failed, or nobody knows. The next follows soon, not after a whole beat.
    pub fn on_failure(&mut self, now: Instant) -> Step {
        self.sent = None;
        self.due = now + self.beat / 6;
        self.on_timeout(now)
    }

    pub fn next_timeout(&self) -> Instant {
        let due = match self.sent {
            None => Some(self.due),
            Some(_) => None,
        };
        match (self.state, due) {
            (State::Held { until }, Some(due)) => until.min(due),
            (State::Held { until }, None) => until,
            (State::Lost, Some(due)) => due,
            // Its answer, or its failure, comes by the store's own deadline.
            (State::Lost, None) => self.due + self.lease,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;
    use crate::observe;

    /// The store's side of one lease, by a clock of its own.
    #[derive(Default)]
    struct Held {
        until: Option<Instant>,
    }

    #[derive(Clone, Debug)]
    enum Event {
        /// Time passes, and owner looks at the clock (or, paused, does not).
        Pass {
            ms: u64,
            looks: bool,
        },
        /// The oldest beat under way reaches the store; its answer comes back, or is lost.
        Arrive {
            answered: bool,
        },
        Fail,
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            4 => (1..4_000u64, any::<bool>()).prop_map(|(ms, looks)| Event::Pass { ms, looks }),
            4 => any::<bool>().prop_map(|answered| Event::Arrive { answered }),
            1 => Just(Event::Fail),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        /// Whoever may adopt looks at the store's side; the owner must have stopped by then.
        #[test]
        fn an_owner_never_holds_what_the_store_has_let_go(events in proptest::collection::vec(event(), 0..60)) {
            let mut now = observe::now();
            let mut lease = Lease::new(now, &Settings::default());
            let (mut store, mut under_way) = (Held::default(), VecDeque::new());
            for event in events {
                match event {
                    Event::Pass { ms, looks } => {
                        now += Duration::from_millis(ms);
                        if looks && lease.on_timeout(now) == Step::Beat {
                            under_way.push_back(());
                        }
                    }
                    Event::Arrive { answered } => {
                        if under_way.pop_front().is_some() {
                            store.until = Some(now + Duration::from_millis(Settings::default().lease_ms));
                            let _ = if answered { lease.on_beat(now) } else { lease.on_failure(now) };
                        }
                    }
                    Event::Fail => {
                        under_way.clear();
                        let _ = lease.on_failure(now);
                    }
                }
                let is_free = store.until.is_none_or(|until| until <= now);
                prop_assert!(!(is_free && lease.is_held(now)));
            }
        }
    }

    #[test]
    fn a_late_answer_is_worth_nothing() {
        let begun = observe::now();
        let mut lease = Lease::new(begun, &Settings::default());
        assert_eq!(lease.on_timeout(begun), Step::Beat);
        assert_eq!(lease.on_timeout(begun), Step::Wait);
        let _ = lease.on_beat(begun + Duration::from_secs(11));
        assert!(!lease.is_held(begun + Duration::from_secs(11)));
    }

    #[test]
    fn who_cannot_renew_in_time_stops_once_and_beats_on() {
        let begun = observe::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut lease = Lease::new(begun, &Settings::default());
        assert_eq!(lease.on_timeout(begun), Step::Beat);
        assert_eq!(lease.on_beat(begun), Step::Wait);
        assert!(lease.is_held(at(9)));
        assert_eq!(lease.on_timeout(at(3)), Step::Beat);
        assert_eq!(lease.on_failure(at(4)), Step::Wait);
        assert_eq!(lease.on_timeout(at(10)), Step::Stop);
        assert_eq!(lease.on_timeout(at(10)), Step::Beat);
        assert_eq!(lease.on_beat(at(11)), Step::Wait);
        assert!(lease.is_held(at(19)) && !lease.is_held(at(20)));
    }

    #[test]
    fn who_was_paused_for_longer_than_the_lease_is_told_to_stop() {
        let begun = observe::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut lease = Lease::new(begun, &Settings::default());
        assert_eq!(lease.on_timeout(begun), Step::Beat);
        assert_eq!(lease.on_beat(begun), Step::Wait);
        assert_eq!(lease.on_timeout(at(9)), Step::Beat);
        // Paused at 9 with the beat under way; the answer is read at 18, within that beat's lease.
        assert_eq!(lease.on_beat(at(18)), Step::Stop);
        assert!(lease.is_held(at(18)));
    }
}
