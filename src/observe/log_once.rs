//! Decides which occurrences of a recurring failure to log: the first, and later ones with another reason. Pure.

use std::time::{Duration, Instant};

/// Shortest time between two lines. An engine whose failures alternate must not fill the log.
const PAUSE: Duration = Duration::from_secs(10);
/// A failure after a success and so much time without any is another one, although its reason is the same.
const QUIET: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub struct LogOnce {
    last_reason: Option<String>,
    logged_at: Option<Instant>,
    failed_at: Option<Instant>,
    is_over: bool,
}

impl LogOnce {
    pub fn should_log(&mut self, now: Instant, reason: &str) -> bool {
        let was_quiet = self.failed_at.is_some_and(|at| now >= at + QUIET);
        if std::mem::take(&mut self.is_over) && was_quiet {
            self.last_reason = None;
        }
        self.failed_at = Some(now);
        let is_too_soon = self.logged_at.is_some_and(|at| now < at + PAUSE);
        if is_too_soon || self.last_reason.as_deref() == Some(reason) {
            return false;
        }
        self.last_reason = Some(reason.to_owned());
        self.logged_at = Some(now);
        true
    }

    /// The operation succeeded.
    pub fn reset(&mut self) {
        self.is_over = true;
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
        log.reset();
        assert!(log.should_log(at(171), "refused"));
    }

    #[test]
    fn what_fails_and_succeeds_in_turn_is_one_line() {
        let start = crate::observe::now();
        let mut log = LogOnce::default();
        let lines = (0..1_000).filter(|second| {
            log.reset();
            log.should_log(start + Duration::from_secs(*second), "refused")
        });
        assert_eq!(lines.count(), 1);
    }
}
