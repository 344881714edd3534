//! Whether an engine takes the key that the router has for it, as its answers show.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Instant;

use crate::observe;

/// What a worker's answers showed of the router's key for it. Listed with another key it has another one.
#[derive(Debug)]
pub struct RouterKey {
    /// When the key was listed.
    since: Instant,
    /// When the newest request was sent for which the engine has refused the key, in microseconds since it was listed; 0
    /// before the first.
    refused_us: AtomicU64,
    /// When the newest request was sent with the key that the engine has answered otherwise, counted likewise.
    accepted_us: AtomicU64,
    is_refusal_logged: AtomicBool,
}

impl Default for RouterKey {
    fn default() -> Self {
        Self {
            since: observe::now(),
            refused_us: AtomicU64::new(0),
            accepted_us: AtomicU64::new(0),
            is_refusal_logged: AtomicBool::new(false),
        }
    }
}

impl RouterKey {
    /// The engine has refused it to a request that was sent at `sent`. True if that should be logged.
    pub fn on_refused(&self, sent: Instant) -> bool {
        self.refused_us.fetch_max(self.age_us(sent), Relaxed);
        !self.is_refusal_logged.swap(true, Relaxed)
    }

    /// Whatever the engine has answered to a request that was sent with the key at `sent`, it has not refused the key.
    pub fn on_accepted(&self, sent: Instant) {
        self.accepted_us.fetch_max(self.age_us(sent), Relaxed);
    }

    /// True if the engine has refused the key, and answered no request otherwise that was sent later.
    pub fn is_refused(&self) -> bool {
        self.refused_us.load(Relaxed) > self.accepted_us.load(Relaxed)
    }

    /// The next refusal is logged again.
    pub fn log_next_refusal(&self) {
        self.is_refusal_logged.store(false, Relaxed);
    }

    /// The engine may be another process now, which may take the key.
    pub(super) fn forget_refusal(&self) {
        self.log_next_refusal();
        self.refused_us.store(0, Relaxed);
    }

    fn age_us(&self, sent: Instant) -> u64 {
        let age = sent.saturating_duration_since(self.since);
        u64::try_from(age.as_micros()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_key_is_refused_until_the_engine_answers_a_later_request_or_is_another_process() {
        let key = RouterKey::default();
        let at = |ms| key.since + Duration::from_millis(ms);
        assert!(!key.is_refused());
        key.on_accepted(at(1));
        key.on_refused(at(2));
        key.on_refused(at(1));
        assert!(key.is_refused());
        key.on_accepted(at(3));
        assert!(!key.is_refused());
        key.on_refused(at(4));
        assert!(key.is_refused());
        key.forget_refusal();
        assert!(!key.is_refused());
    }

    #[test]
    fn a_refusal_is_logged_once_until_the_worker_answers_again() {
        let key = RouterKey::default();
        assert!(key.on_refused(key.since));
        assert!(!key.on_refused(key.since));
        key.log_next_refusal();
        assert!(key.on_refused(key.since));
    }
}
