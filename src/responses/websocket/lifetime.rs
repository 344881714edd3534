//! When a connection is pinged, and when its time is over. Pure.

use std::time::{Duration, Instant};

use super::settings::Settings;

/// Pings that a client without a turn may leave unanswered.
const MISSES_MAX: u32 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    Ping,
    /// The client answers no pings.
    Unresponsive,
    /// No turn for too long.
    Idle,
    /// The connection takes no new turns. Comes once.
    Expired,
}

/// The times of one connection.
#[derive(Debug)]
pub struct Lifetime {
    ping_interval: Duration,
    idle_timeout: Duration,
    expires: Instant,
    is_expired: bool,
    next_ping: Instant,
    unanswered: u32,
    /// When the last turn ended; `None` while one runs.
    idle_since: Option<Instant>,
}

impl Lifetime {
    pub fn new(now: Instant, settings: &Settings) -> Self {
        Self {
            ping_interval: settings.ping_interval,
            idle_timeout: settings.idle_timeout,
            expires: now + settings.max_age,
            is_expired: false,
            next_ping: now + settings.ping_interval,
            unanswered: 0,
            idle_since: Some(now),
        }
    }

    /// A frame came from the client, or a part of one that is large enough to show that it is there.
    pub fn on_received(&mut self) {
        self.unanswered = 0;
    }

    /// Whether turns run or wait.
    pub fn set_busy(&mut self, is_busy: bool, now: Instant) {
        match (is_busy, self.idle_since) {
            (true, Some(_)) => self.idle_since = None,
            (false, None) => {
                self.idle_since = Some(now);
                // A busy client may have left pings unanswered while it read nothing.
                self.unanswered = 0;
            }
            (true, None) | (false, Some(_)) => {}
        }
    }

    /// The next time to ask what is due.
    pub fn next(&self) -> Instant {
        let idle = self.idle_since.map(|since| since + self.idle_timeout);
        let expires = (!self.is_expired).then_some(self.expires);
        let times = [Some(self.next_ping), idle, expires];
        times.into_iter().flatten().min().unwrap_or(self.next_ping)
    }

    pub fn due(&mut self, now: Instant) -> Option<Due> {
        if !self.is_expired && now >= self.expires {
            self.is_expired = true;
            return Some(Due::Expired);
        }
        if self
            .idle_since
            .is_some_and(|since| now >= since + self.idle_timeout)
        {
            return Some(Due::Idle);
        }
        if now < self.next_ping {
            return None;
        }
        if self.idle_since.is_some() && self.unanswered >= MISSES_MAX {
            return Some(Due::Unresponsive);
        }
        self.unanswered += 1;
        self.next_ping = now + self.ping_interval;
        Some(Due::Ping)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;

    fn lifetime() -> (Lifetime, impl Fn(u64) -> Instant) {
        let settings = Settings {
            ping_interval: Duration::from_secs(30),
            idle_timeout: Duration::from_secs(300),
            max_age: Duration::from_secs(3_600),
            ..Settings::default()
        };
        let opened = observe::now();
        let at = move |seconds| opened + Duration::from_secs(seconds);
        (Lifetime::new(opened, &settings), at)
    }

    #[test]
    fn an_idle_client_that_misses_two_pings_is_unresponsive() {
        let (mut lifetime, at) = lifetime();
        assert_eq!(lifetime.due(at(29)), None);
        assert_eq!(lifetime.next(), at(30));
        assert_eq!(lifetime.due(at(30)), Some(Due::Ping));
        assert_eq!(lifetime.due(at(30)), None);
        assert_eq!(lifetime.due(at(60)), Some(Due::Ping));
        assert_eq!(lifetime.due(at(90)), Some(Due::Unresponsive));
    }

    #[test]
    fn anything_received_counts_as_an_answer() {
        let (mut lifetime, at) = lifetime();
        for seconds in [30, 60, 90, 120] {
            assert_eq!(lifetime.due(at(seconds)), Some(Due::Ping));
            lifetime.on_received();
        }
    }

    #[test]
    fn a_client_with_a_turn_is_pinged_but_need_not_answer() {
        let (mut lifetime, at) = lifetime();
        lifetime.set_busy(true, at(0));
        for ping in 1..=20 {
            assert_eq!(lifetime.due(at(30 * ping)), Some(Due::Ping));
        }
        lifetime.set_busy(false, at(600));
        assert_eq!(lifetime.due(at(630)), Some(Due::Ping));
        assert_eq!(lifetime.due(at(660)), Some(Due::Ping));
        assert_eq!(lifetime.due(at(690)), Some(Due::Unresponsive));
    }

    #[test]
    fn a_connection_without_a_turn_is_idle_from_the_end_of_the_last_one() {
        let (mut lifetime, at) = lifetime();
        lifetime.set_busy(true, at(10));
        lifetime.set_busy(false, at(100));
        lifetime.set_busy(false, at(200));
        assert_ne!(lifetime.due(at(399)), Some(Due::Idle));
        assert_eq!(lifetime.due(at(400)), Some(Due::Idle));
    }

    #[test]
    fn the_age_is_reported_once_also_while_turns_run() {
        let (mut lifetime, at) = lifetime();
        lifetime.set_busy(true, at(0));
        assert_eq!(lifetime.due(at(3_600)), Some(Due::Expired));
        assert_eq!(lifetime.due(at(3_600)), Some(Due::Ping));
        assert_eq!(lifetime.due(at(3_601)), None);
        assert!(lifetime.next() > at(3_601));
    }
}
