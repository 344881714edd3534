//! The lease of an owner, as the owner sees it: whether it may still run its background responses.
//!
//! The lease ends by the store's clock. The owner must consider it ended no later than that, so it counts from
//! before the heartbeat was sent and keeps 5 % in reserve for clock drift. An owner that could not renew in
//! time knows only that another replica may have taken its runs over. They go on: the fencing token of each
//! record decides, and the owner stops a run when the store says that its token is outdated. So a store that
//! was away for longer than the lease, for everybody, ends nothing.

use std::time::{Duration, Instant};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::DurationText;

/// Which replica runs a background response: its owner holds a lease and renews it with heartbeats; another
/// replica takes over when the lease ends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// A lease that is not renewed ends after this time. Until then a dead owner's responses wait, and for up to seven
    /// tenths of it more (at most 7 s): a store that comes back after an outage has no leases at first, and living
    /// owners must have the time to renew theirs. A heartbeat comes every three tenths of it (at most 3 s).
    #[serde(with = "DurationText")]
    #[schemars(extend("min" = "1s"))]
    pub duration: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        // A dead owner's responses are taken over within duration + heartbeat interval + 2 scan intervals, below 20 s.
        Self {
            duration: Duration::from_secs(10),
        }
    }
}

/// Those of the default lease. Longer leases have them too: a heartbeat or a scan is one small operation.
const MAX_HEARTBEAT_INTERVAL: Duration = Duration::from_secs(3);
const MAX_SCAN_INTERVAL: Duration = Duration::from_secs(2);

impl Settings {
    /// Time between two heartbeats of an owner: less than half of the lease, so that one may be lost.
    pub fn heartbeat_interval(&self) -> Duration {
        (self.duration * 3 / 10).min(MAX_HEARTBEAT_INTERVAL)
    }

    /// Time between two scans for responses whose owner is dead.
    pub fn scan_interval(&self) -> Duration {
        (self.duration / 5).min(MAX_SCAN_INTERVAL)
    }
}

/// Early heartbeats are at least this fraction of the heartbeat interval apart.
const EARLY_FRACTION: u32 = 30;

/// What the owner must do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Step {
    SendHeartbeat,
    /// The lease was not renewed in time: other replicas may have taken runs over. Returned once per loss.
    Expired,
    /// Nothing until [`Lease::next_timeout`].
    Wait,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// No other owner may take the owner's responses over until then.
    Held { until: Instant },
    /// The owner may take nothing over until a heartbeat succeeds.
    Lost,
}

#[derive(Clone, Debug)]
pub struct Lease {
    state: State,
    lease: Duration,
    heartbeat_interval: Duration,
    /// When the next heartbeat is due.
    due: Instant,
    /// When the pending heartbeat was sent.
    sent: Option<Instant>,
    /// No heartbeat is sent before this time.
    not_before: Instant,
}

impl Lease {
    /// Creates a lease that is not held until the first heartbeat succeeds.
    pub fn new(now: Instant, settings: &Settings) -> Self {
        Self {
            state: State::Lost,
            lease: settings.duration * 19 / 20,
            heartbeat_interval: settings.heartbeat_interval(),
            due: now,
            sent: None,
            not_before: now,
        }
    }

    /// Whether no other replica can have taken a run over.
    pub fn is_held(&self, now: Instant) -> bool {
        matches!(self.state, State::Held { until } if now < until)
    }

    pub fn on_timeout(&mut self, now: Instant) -> Step {
        if self.expire(now) == Step::Expired {
            return Step::Expired;
        }
        if self.sent.is_none() && self.due <= now {
            self.sent = Some(now);
            self.not_before = now + self.heartbeat_interval / EARLY_FRACTION;
            return Step::SendHeartbeat;
        }
        Step::Wait
    }

    fn expire(&mut self, now: Instant) -> Step {
        match self.state {
            State::Held { until } if until <= now => {
                self.state = State::Lost;
                Step::Expired
            }
            State::Held { .. } | State::Lost => Step::Wait,
        }
    }

    /// Makes the next heartbeat early, because the owner has a new run. A store that restarted empty has no
    /// lease of this owner until the next heartbeat, and other replicas would take the run for an orphan.
    pub fn expedite_heartbeat(&mut self, now: Instant) {
        if self.sent.is_none() {
            self.due = self.due.min(self.not_before.max(now));
        }
    }

    /// The heartbeat succeeded: the lease is renewed from when it was sent. A reply after that lease has ended
    /// renews nothing. The next heartbeat is sent by [`Lease::on_timeout`] alone.
    pub fn on_heartbeat(&mut self, now: Instant) -> Step {
        let Some(sent) = self.sent.take() else {
            return Step::Wait;
        };
        self.due = sent + self.heartbeat_interval;
        let was_held = self.is_held(now);
        let was_lost = matches!(self.state, State::Lost);
        let until = sent + self.lease;
        if until <= now {
            return self.expire(now);
        }
        self.state = State::Held { until };
        // The lease expired before this reply, so another replica may have taken the runs over.
        if was_held || was_lost {
            Step::Wait
        } else {
            Step::Expired
        }
    }

    /// The heartbeat failed, or its outcome is unknown. The next follows early.
    pub fn on_failure(&mut self, now: Instant) -> Step {
        self.sent = None;
        self.due = now + self.heartbeat_interval / 6;
        self.expire(now)
    }

    pub fn next_timeout(&self) -> Instant {
        match (self.state, self.sent) {
            (State::Held { until }, None) => until.min(self.due),
            (State::Held { until }, Some(_)) => until,
            (State::Lost, None) => self.due,
            // The reply or a failure comes by the store's own deadline. `due` may have passed long ago.
            (State::Lost, Some(sent)) => sent + self.lease,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::observe;

    const OWNERS: usize = 3;

    /// A clock with an offset and a drift.
    #[derive(Clone, Copy, Debug)]
    struct Clock {
        offset_ms: u64,
        /// Its milliseconds per second of real time.
        rate: u64,
    }

    impl Clock {
        fn at(&self, started: Instant, world_ms: u64) -> Instant {
            started + Duration::from_millis(self.offset_ms + world_ms * self.rate / 1_000)
        }
    }

    fn clock() -> impl Strategy<Value = Clock> {
        (0..100_000u64, 980..1_020u64).prop_map(|(offset_ms, rate)| Clock { offset_ms, rate })
    }

    /// An owner that competes for the response.
    struct Contender {
        lease: Lease,
        runs: bool,
        /// A heartbeat is on its way to the store; its reply is on its way back.
        is_sent: bool,
        is_renewed: bool,
        /// When the lease ends in the store, by the store's clock.
        until: Option<Instant>,
    }

    #[derive(Clone, Debug)]
    enum Event {
        Pass(u64),
        /// An owner polls its lease; a paused one does not.
        Look,
        /// The heartbeat reaches the store.
        Arrive,
        /// The reply reaches the owner.
        Answer,
        /// The heartbeat times out at the owner.
        Fail,
        /// The owner takes the response over, if no lease in the store protects it.
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

        /// A takeover checks only the lease in the store; the previous owner must know by then that it may have lost.
        #[test]
        fn a_lease_has_one_holder(
            clocks in proptest::collection::vec(clock(), OWNERS),
            store in clock(),
            events in proptest::collection::vec(event(), 0..120),
        ) {
            let started = observe::now();
            let settings = Settings::default();
            let mut world_ms = 0;
            let mut contenders: Vec<Contender> = clocks
                .iter()
                .map(|clock| Contender {
                    lease: Lease::new(clock.at(started, 0), &settings),
                    runs: false,
                    is_sent: false,
                    is_renewed: false,
                    until: None,
                })
                .collect();
            let mut owner: Option<usize> = None;
            for (at, event) in events {
                let (now, stored) = (clocks[at].at(started, world_ms), store.at(started, world_ms));
                let one = &mut contenders[at];
                let step = match event {
                    Event::Pass(ms) => {
                        world_ms += ms;
                        Step::Wait
                    }
                    Event::Look => one.lease.on_timeout(now),
                    Event::Arrive => {
                        if one.is_sent {
                            (one.is_sent, one.is_renewed) = (false, true);
                            one.until = Some(stored + settings.duration);
                        }
                        Step::Wait
                    }
                    Event::Answer => {
                        if std::mem::take(&mut one.is_renewed) {
                            one.lease.on_heartbeat(now)
                        } else {
                            Step::Wait
                        }
                    }
                    Event::Fail => {
                        // The heartbeat may still reach the store, but its reply is ignored.
                        one.is_renewed = false;
                        one.lease.on_failure(now)
                    }
                    Event::Take => {
                        let is_free = owner.is_none_or(|owner| {
                            contenders[owner].until.is_none_or(|until| until <= stored)
                        });
                        if is_free && contenders[at].lease.is_held(now) {
                            contenders[at].lease.expedite_heartbeat(now);
                            owner = Some(at);
                            contenders[at].runs = true;
                        }
                        Step::Wait
                    }
                };
                match step {
                    Step::SendHeartbeat => (contenders[at].is_sent, contenders[at].is_renewed) = (true, false),
                    Step::Expired => contenders[at].runs = false,
                    Step::Wait => {}
                }
                let holders = contenders.iter().zip(&clocks).filter(|(one, clock)| {
                    one.runs && one.lease.is_held(clock.at(started, world_ms))
                });
                prop_assert!(holders.count() <= 1);
            }
        }
    }

    #[test]
    fn a_reply_after_the_lease_has_ended_renews_nothing() {
        let started = observe::now();
        let mut lease = Lease::new(started, &Settings::default());
        assert_eq!(lease.on_timeout(started), Step::SendHeartbeat);
        assert_eq!(lease.on_timeout(started), Step::Wait);
        let _ = lease.on_heartbeat(started + Duration::from_secs(11));
        assert!(!lease.is_held(started + Duration::from_secs(11)));
    }

    #[test]
    fn a_reply_that_comes_after_the_lease_was_lost_leaves_the_next_heartbeat_due() {
        let started = observe::now();
        let at = |seconds| started + Duration::from_secs(seconds);
        let mut lease = Lease::new(started, &Settings::default());
        assert_eq!(lease.on_timeout(started), Step::SendHeartbeat);
        assert_eq!(lease.on_heartbeat(started), Step::Wait);
        assert_eq!(lease.on_timeout(at(3)), Step::SendHeartbeat);
        // The process is paused, and sees its timer before the reply.
        assert_eq!(lease.on_timeout(at(30)), Step::Expired);
        assert_eq!(lease.on_heartbeat(at(30)), Step::Wait);
        assert_eq!(lease.on_timeout(at(30)), Step::SendHeartbeat);
        assert_eq!(lease.on_heartbeat(at(30)), Step::Wait);
        assert!(lease.is_held(at(39)));
    }

    #[test]
    fn an_owner_that_was_paused_has_nothing_to_do_before_the_reply() {
        let started = observe::now();
        let at = |seconds| started + Duration::from_secs(seconds);
        let mut lease = Lease::new(started, &Settings::default());
        assert_eq!(lease.on_timeout(started), Step::SendHeartbeat);
        assert_eq!(lease.on_heartbeat(started), Step::Wait);
        assert_eq!(lease.on_timeout(at(30)), Step::Expired);
        assert_eq!(lease.on_timeout(at(30)), Step::SendHeartbeat);
        assert!(lease.next_timeout() > at(39));
    }

    #[test]
    fn an_owner_that_cannot_renew_learns_it_once_and_keeps_sending_heartbeats() {
        let started = observe::now();
        let at = |seconds| started + Duration::from_secs(seconds);
        let mut lease = Lease::new(started, &Settings::default());
        assert_eq!(lease.on_timeout(started), Step::SendHeartbeat);
        assert_eq!(lease.on_heartbeat(started), Step::Wait);
        assert!(lease.is_held(at(9)));
        assert_eq!(lease.on_timeout(at(3)), Step::SendHeartbeat);
        assert_eq!(lease.on_failure(at(4)), Step::Wait);
        assert_eq!(lease.on_timeout(at(10)), Step::Expired);
        assert_eq!(lease.on_timeout(at(10)), Step::SendHeartbeat);
        assert_eq!(lease.on_heartbeat(at(11)), Step::Wait);
        assert!(lease.is_held(at(19)) && !lease.is_held(at(20)));
    }

    #[test]
    fn a_new_run_makes_the_next_heartbeat_early() {
        let started = observe::now();
        let at = |ms| started + Duration::from_millis(ms);
        let mut lease = Lease::new(started, &Settings::default());
        assert_eq!(lease.on_timeout(started), Step::SendHeartbeat);
        assert_eq!(lease.on_heartbeat(started), Step::Wait);
        lease.expedite_heartbeat(at(20));
        assert_eq!(lease.next_timeout(), at(100));
        assert_eq!(lease.on_timeout(at(20)), Step::Wait);
        assert_eq!(lease.on_timeout(at(100)), Step::SendHeartbeat);
    }

    #[test]
    fn an_owner_paused_longer_than_its_lease_learns_it() {
        let started = observe::now();
        let at = |seconds| started + Duration::from_secs(seconds);
        let mut lease = Lease::new(started, &Settings::default());
        assert_eq!(lease.on_timeout(started), Step::SendHeartbeat);
        assert_eq!(lease.on_heartbeat(started), Step::Wait);
        assert_eq!(lease.on_timeout(at(9)), Step::SendHeartbeat);
        // Paused at 9 s with a heartbeat pending; the reply is read at 18 s, within that heartbeat's lease.
        assert_eq!(lease.on_heartbeat(at(18)), Step::Expired);
        assert!(lease.is_held(at(18)));
    }
}
