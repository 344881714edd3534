//! For how long a router that does not answer is asked again. Pure.

use std::time::{Duration, Instant};

/// Counts the time since the first of the failures that came one after the other.
#[derive(Debug)]
pub(super) struct Patience {
    limit: Duration,
    failing_since: Option<Instant>,
}

impl Patience {
    pub(super) fn new(limit: Duration) -> Self {
        Self {
            limit,
            failing_since: None,
        }
    }

    pub(super) fn on_success(&mut self) {
        self.failing_since = None;
    }

    /// Whether to ask again.
    pub(super) fn on_failure(&mut self, now: Instant) -> bool {
        let since = *self.failing_since.get_or_insert(now);
        now.saturating_duration_since(since) < self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;

    #[test]
    fn patience_ends_with_time_and_begins_anew_with_an_answer() {
        let begin = observe::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut patience = Patience::new(Duration::from_secs(10));
        assert!(patience.on_failure(at(0)));
        assert!(patience.on_failure(at(9)));
        assert!(!patience.on_failure(at(10)));
        patience.on_success();
        assert!(patience.on_failure(at(11)));
        assert!(!Patience::new(Duration::ZERO).on_failure(begin));
    }
}
