//! When keys may be looked at besides the regular looks: because a token names a key that is not known. Pure.

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
}

impl Pacing {
    /// The first look runs.
    pub(super) fn new(interval: Duration) -> Self {
        Self {
            interval,
            is_running: true,
            ended: None,
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

    pub(super) fn on_ended(&mut self, now: Instant) {
        self.is_running = false;
        self.ended = Some(now);
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
        pacing.on_ended(at(1));
        assert_eq!(pacing.on_unknown_key(at(30)), Wanted::TooSoon);
        assert_eq!(pacing.on_unknown_key(at(31)), Wanted::Start);
        // All others wait for that look.
        assert_eq!(pacing.on_unknown_key(at(31)), Wanted::Wait);
        pacing.on_ended(at(32));
        assert_eq!(pacing.on_unknown_key(at(33)), Wanted::TooSoon);
        pacing.on_started();
        assert_eq!(pacing.on_unknown_key(at(33)), Wanted::Wait);
    }
}
