//! Decides which occurrences of a recurring failure to log: the first, and later ones with another reason.

use std::time::{Duration, Instant};

/// Shortest time between two lines. An engine whose failures alternate must not fill the log.
const PAUSE: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub(super) struct LogOnce {
    last_reason: Option<String>,
    logged_at: Option<Instant>,
}

impl LogOnce {
    pub(super) fn should_log(&mut self, now: Instant, reason: &str) -> bool {
        let is_too_soon = self.logged_at.is_some_and(|at| now < at + PAUSE);
        if is_too_soon || self.last_reason.as_deref() == Some(reason) {
            return false;
        }
        self.last_reason = Some(reason.to_owned());
        self.logged_at = Some(now);
        true
    }

    /// The operation succeeded; the next failure is logged again.
    pub(super) fn reset(&mut self) {
        self.last_reason = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_logged_once_and_lines_are_rare() {
        let start = crate::observe::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut log = LogOnce::default();
        assert!(log.should_log(start, "refused"));
        assert!(!log.should_log(at(100), "refused"));
        assert!(log.should_log(at(100), "cut"));
        assert!(!log.should_log(at(105), "refused"));
        assert!(log.should_log(at(110), "refused"));
        log.reset();
        assert!(!log.should_log(at(111), "refused"));
        assert!(log.should_log(at(120), "refused"));
    }
}
