//! When keys may be looked at besides the regular looks: because a token names a key that is not known. And whether the
//! keys that are known are all that there are. Pure.

use std::time::{Duration, Instant};

/// What a request whose key is not known does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// Start a look, and wait for it.
    Start,
    /// Wait for the look that runs.
    Wait,
    /// The last look is too recent: the key does not exist.
    TooSoon,
}

/// Whether a look runs, and when the last one ended.
#[derive(Debug)]
pub(super) struct Pacing {
    /// Between the end of a look and a start that a token asks for.
    interval: Duration,
    is_running: bool,
    ended: Option<Instant>,
    /// Whether the last look read the keys.
    has_read: bool,
}

impl Pacing {
    /// The first look runs.
    pub(super) fn new(interval: Duration) -> Self {
        Self {
            interval,
            is_running: true,
            ended: None,
            has_read: false,
        }
    }

    pub(super) fn on_unknown_key(&mut self, now: Instant) -> Wanted {
        if self.is_running {
            return Wanted::Wait;
        }
        let since = self.ended.map(|ended| now.saturating_duration_since(ended));
        if since.is_some_and(|since| since < self.interval) {
            return Wanted::TooSoon;
        }
        self.is_running = true;
        Wanted::Start
    }

    pub(super) fn on_started(&mut self) {
        self.is_running = true;
    }

    pub(super) fn on_ended(&mut self, now: Instant, has_read: bool) {
        self.is_running = false;
        self.ended = Some(now);
        self.has_read = has_read;
    }

    /// Whether a key that is not known does not exist, as far as a look may tell. Not while the last look failed, or while
    /// one runs that a request has waited for.
    pub(super) fn is_current(&self) -> bool {
        self.has_read && !self.is_running
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;

    #[test]
    fn unknown_keys_start_a_look_no_more_often_than_allowed() {
        let start = observe::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let mut pacing = Pacing::new(Duration::from_secs(30));
        assert_eq!(pacing.on_unknown_key(at(0)), Wanted::Wait);
        pacing.on_ended(at(1), true);
        assert_eq!(pacing.on_unknown_key(at(30)), Wanted::TooSoon);
        assert_eq!(pacing.on_unknown_key(at(31)), Wanted::Start);
        // All others wait for that look.
        assert_eq!(pacing.on_unknown_key(at(31)), Wanted::Wait);
        pacing.on_ended(at(32), true);
        assert_eq!(pacing.on_unknown_key(at(33)), Wanted::TooSoon);
        pacing.on_started();
        assert_eq!(pacing.on_unknown_key(at(33)), Wanted::Wait);
    }

    #[test]
    fn an_unknown_key_may_exist_while_the_keys_cannot_be_read() {
        let now = observe::now();
        let mut pacing = Pacing::new(Duration::from_secs(30));
        assert!(!pacing.is_current());
        for has_read in [true, false, true] {
            pacing.on_started();
            assert!(!pacing.is_current());
            pacing.on_ended(now, has_read);
            assert_eq!(pacing.is_current(), has_read);
        }
    }
}
