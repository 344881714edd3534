//! Whether this replica may still run what it owns.
//!
//! The store's clock ends a lease, ours must end it no later: it counts from before the beat was
//! sent, and leaves a twentieth to clocks that do not run alike. An owner that could not renew in time
//! stops all it runs, since another may run it now.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

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

/// Beats that are made early are so much closer together at least than those that are not.
const HASTE: u32 = 30;

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
    /// No beat is sent before.
    rest: Instant,
}

impl Lease {
    /// Not held until the first beat was answered.
    pub fn new(now: Instant, settings: &Settings) -> Self {
        Self {
            state: State::Lost,
            lease: Duration::from_millis(settings.lease_ms) * 19 / 20,
            beat: Duration::from_millis(settings.beat_ms),
            due: now,
            sent: None,
            rest: now,
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
            self.rest = now + self.beat / HASTE;
            return Step::Beat;
        }
        Step::Wait
    }

    /// Something new is owned from now on. A store that has restarted empty knows of no lease until the next
    /// beat, and others would take it for an orphan.
    pub fn hasten(&mut self, now: Instant) {
        if self.sent.is_none() {
            self.due = self.due.min(self.rest.max(now));
        }
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
    use proptest::prelude::*;

    use super::*;
    use crate::observe;

    const OWNERS: usize = 3;

    /// A clock that began at another time than the others, and does not run quite as they do.
    #[derive(Clone, Copy, Debug)]
    struct Clock {
        offset_ms: u64,
        /// Its milliseconds in a thousand of the world's.
        rate: u64,
    }

    impl Clock {
        fn at(&self, begun: Instant, world_ms: u64) -> Instant {
            begun + Duration::from_millis(self.offset_ms + world_ms * self.rate / 1_000)
        }
    }

    fn clock() -> impl Strategy<Value = Clock> {
        (0..100_000u64, 980..1_020u64).prop_map(|(offset_ms, rate)| Clock { offset_ms, rate })
    }

    /// One that may run the response, as it knows of it.
    struct Contender {
        lease: Lease,
        runs: bool,
        /// Whether a beat is under way that the store has not seen, and then one whose answer was not heard.
        beats: bool,
        is_beaten: bool,
        /// The store's side of its lease, by the store's clock.
        until: Option<Instant>,
    }

    #[derive(Clone, Debug)]
    enum Event {
        Pass(u64),
        /// An owner looks at its clock; one that is paused does not.
        Look,
        /// A beat that is under way reaches the store.
        Arrive,
        /// Its answer reaches the owner.
        Answer,
        /// The owner waits for it no longer.
        Fail,
        /// It asks the store for the response, and gets it if nobody's lease holds it.
        Take,
    }

    fn event() -> impl Strategy<Value = (usize, Event)> {
        let event = prop_oneof![
            3 => (1..4_000u64).prop_map(Event::Pass),
            4 => Just(Event::Look),
            4 => Just(Event::Arrive),
            4 => Just(Event::Answer),
            1 => Just(Event::Fail),
            3 => Just(Event::Take),
        ];
        (0..OWNERS, event)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        /// Whoever takes it over looks at the store's side alone; who had it must have stopped by then.
        #[test]
        fn a_lease_has_one_holder(
            clocks in proptest::collection::vec(clock(), OWNERS),
            store in clock(),
            events in proptest::collection::vec(event(), 0..120),
        ) {
            let begun = observe::now();
            let settings = Settings::default();
            let mut world_ms = 0;
            let mut contenders: Vec<Contender> = clocks
                .iter()
                .map(|clock| Contender {
                    lease: Lease::new(clock.at(begun, 0), &settings),
                    runs: false,
                    beats: false,
                    is_beaten: false,
                    until: None,
                })
                .collect();
            let mut owner: Option<usize> = None;
            for (at, event) in events {
                let (now, stored) = (clocks[at].at(begun, world_ms), store.at(begun, world_ms));
                let one = &mut contenders[at];
                let step = match event {
                    Event::Pass(ms) => {
                        world_ms += ms;
                        Step::Wait
                    }
                    Event::Look => one.lease.on_timeout(now),
                    Event::Arrive => {
                        if one.beats {
                            (one.beats, one.is_beaten) = (false, true);
                            one.until = Some(stored + Duration::from_millis(settings.lease_ms));
                        }
                        Step::Wait
                    }
                    Event::Answer => match std::mem::take(&mut one.is_beaten) {
                        true => one.lease.on_beat(now),
                        false => Step::Wait,
                    },
                    Event::Fail => {
                        // It may come to the store all the same, and its answer does not count.
                        one.is_beaten = false;
                        one.lease.on_failure(now)
                    }
                    Event::Take => {
                        let is_free = owner.is_none_or(|owner| {
                            contenders[owner].until.is_none_or(|until| until <= stored)
                        });
                        if is_free && contenders[at].lease.is_held(now) {
                            contenders[at].lease.hasten(now);
                            owner = Some(at);
                            contenders[at].runs = true;
                        }
                        Step::Wait
                    }
                };
                match step {
                    Step::Beat => (contenders[at].beats, contenders[at].is_beaten) = (true, false),
                    Step::Stop => contenders[at].runs = false,
                    Step::Wait => {}
                }
                let holders = contenders.iter().zip(&clocks).filter(|(one, clock)| {
                    one.runs && one.lease.is_held(clock.at(begun, world_ms))
                });
                prop_assert!(holders.count() <= 1);
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
    fn who_owns_something_new_says_so_soon() {
        let begun = observe::now();
        let at = |ms| begun + Duration::from_millis(ms);
        let mut lease = Lease::new(begun, &Settings::default());
        assert_eq!(lease.on_timeout(begun), Step::Beat);
        assert_eq!(lease.on_beat(begun), Step::Wait);
        lease.hasten(at(20));
        assert_eq!(lease.next_timeout(), at(100));
        assert_eq!(lease.on_timeout(at(20)), Step::Wait);
        assert_eq!(lease.on_timeout(at(100)), Step::Beat);
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
