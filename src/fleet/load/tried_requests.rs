//! How many requests an engine may be given that has shown no slots: it is tried with more and more. Pure.

use std::time::{Duration, Instant};

/// The first try. Few engines run fewer at a time.
const FIRST_MOST: u32 = 8;

/// Further than this it is not tried: vLLM's `--max-num-seqs` on most GPUs.
const MAX: u32 = super::DEFAULT_SLOTS;

/// An engine that lets requests wait is tried with more again after so long: what filled it may have ended. Requests
/// may wait in it until its next report then, so not more often.
const RETRY_AFTER: Duration = Duration::from_secs(60);

/// What an engine was seen to run counts for so long after some waited inside it. One that waited for a step by chance
/// would else bound it for ever.
const SHOWN_FOR: Duration = Duration::from_secs(300);

/// What one engine was tried with. Without a report of the engine it stays with the first try.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TriedRequests {
    /// So many requests may be in flight at it.
    pub most: u32,
    /// When some waited inside it the last time.
    waited_at: Option<Instant>,
    /// The most that it has run since some waited inside it the last time, if it ran about what it was tried with then: what
    /// is above that waits, too.
    pub shown: Option<u32>,
}

impl Default for TriedRequests {
    fn default() -> Self {
        Self::FIRST
    }
}

impl TriedRequests {
    /// Of an engine that was tried with nothing yet.
    pub const FIRST: Self = Self {
        most: FIRST_MOST,
        waited_at: None,
        shown: None,
    };

    /// The engine reports what it runs, and whether others wait inside it for one of these to end, while `requests` are
    /// in flight.
    pub fn on_report(&mut self, now: Instant, running: u32, is_full: bool, requests: u32) {
        if is_full {
            // Of many that came at once most may have waited for their prompts to be computed, not for a slot.
            let fewer = self.most - self.most.div_ceil(8);
            self.shown = (running >= fewer).then_some(running);
            self.most = running.max(fewer).clamp(1, MAX);
            self.waited_at = Some(now);
            return;
        }
        // Its memory may have been full before.
        self.most = self.most.max(running.min(MAX));
        let is_old = |at| now.saturating_duration_since(at) >= SHOWN_FOR;
        let shown = self.shown.filter(|_| !self.waited_at.is_some_and(is_old));
        self.shown = shown.map(|shown| shown.max(running));
        // The report says nothing about more requests than the engine has.
        let is_tried = u64::from(requests) * 4 >= u64::from(self.most) * 3;
        if !is_tried || self.most >= MAX {
            return;
        }
        let more = match self.waited_at {
            None => self.most.div_ceil(2),
            Some(at) if now.saturating_duration_since(at) >= RETRY_AFTER => self.most.div_ceil(8),
            Some(_) => return,
        };
        self.most = self.most.saturating_add(more).min(MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;

    /// An engine of so many slots that is always given all that it may have. Returns what it was given at each report,
    /// one a second.
    fn given(slots: u32, seconds: u64) -> Vec<u32> {
        let start = observe::now();
        let mut tried = TriedRequests::default();
        let mut given = Vec::new();
        for second in 0..seconds {
            let most = tried.most;
            given.push(most);
            let now = start + Duration::from_secs(second);
            tried.on_report(now, most.min(slots), most > slots, most);
        }
        given
    }

    #[test]
    fn an_engine_is_tried_with_more_at_each_report_until_some_wait() {
        let tried = given(100, 12);
        assert_eq!(tried[..8], [8, 12, 18, 27, 41, 62, 93, 140]);
        assert_eq!(tried[8..], [122, 106, 100, 100]);
        assert_eq!(given(16, 6), [8, 12, 18, 16, 16, 16]);
        assert_eq!(given(4, 6), [8, 7, 6, 5, 4, 4]);
        assert_eq!(given(1_000, 20).last(), Some(&MAX));
    }

    #[test]
    fn an_engine_that_lets_requests_wait_is_tried_with_a_few_more_after_a_minute() {
        let given = given(16, 70);
        assert!(given[3..62].iter().all(|given| *given == 16), "{given:?}");
        assert_eq!(given[62..66], [16, 18, 16, 16], "{given:?}");
    }

    #[test]
    fn what_it_was_seen_to_run_stays_while_it_is_tried_with_more() {
        let start = observe::now();
        let mut tried = TriedRequests::default();
        tried.on_report(start, 8, true, 10);
        assert_eq!((tried.most, tried.shown), (8, Some(8)));
        tried.on_report(start + RETRY_AFTER, 8, false, 8);
        assert_eq!((tried.most, tried.shown), (9, Some(8)));
        tried.on_report(start + RETRY_AFTER, 9, false, 9);
        assert_eq!(tried.shown, Some(9));
        tried.on_report(start + SHOWN_FOR, 2, false, 2);
        assert_eq!(tried.shown, None);
    }

    #[test]
    fn a_report_of_an_idle_engine_says_nothing_about_more() {
        let mut tried = TriedRequests::default();
        assert_eq!((tried.most, tried.shown), (FIRST_MOST, None));
        tried.on_report(observe::now(), 5, false, 5);
        assert_eq!(tried.most, FIRST_MOST);
        tried.on_report(observe::now(), 6, false, 6);
        assert_eq!((tried.most, tried.shown), (12, None));
    }

    #[test]
    fn an_engine_that_lets_requests_wait_shows_how_many_it_runs() {
        let mut tried = TriedRequests::default();
        tried.on_report(observe::now(), 7, true, 9);
        assert_eq!(tried.shown, Some(7));
        // Its memory was full of one long context.
        tried.on_report(observe::now(), 10, false, 10);
        assert_eq!(tried.shown, Some(10));
    }

    #[test]
    fn an_engine_that_runs_far_fewer_than_it_was_tried_with_shows_nothing() {
        let mut tried = TriedRequests::default();
        tried.on_report(observe::now(), 62, false, 62);
        assert_eq!(tried.most, 93);
        // It computes the prompts of the others.
        tried.on_report(observe::now(), 16, true, 34);
        assert_eq!((tried.most, tried.shown), (81, None));
    }
}
