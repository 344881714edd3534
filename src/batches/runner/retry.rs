//! Whether a line is tried again, and when. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::batches::send::LineAnswer;

/// How many tries have failed that counted, by the number of a line.
pub(super) type FailedTries = BTreeMap<u32, u32>;

/// Tries after the first that may fail for a reason that is the line's own: it breaks an engine.
const MAX_COUNTED: u32 = 5;

/// Before the second try; it doubles with each further one, to 16 s.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// The longest wait for what an answer asks to wait for. Then the line is tried, to see whether it is still so.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(600);

/// The longest pause of a line whose conversation is locked: each try is a call of the store.
const MAX_LOCKED_PAUSE: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
pub(super) struct Tries {
    /// How many have failed that counted, those before this run of its shard too.
    pub(super) counted: u32,
    /// How often in a row its conversation was locked.
    pub(super) locked: u32,
}

impl Tries {
    /// The pause before the next try; `None` if the answer is the line's result. `random`: from 0 to 1.
    pub(super) fn on_answer(&mut self, answer: &LineAnswer, random: f64) -> Option<Duration> {
        if answer.is_locked {
            // 32 s are more than the longest pause.
            let pause = FIRST_PAUSE * (1 << self.locked.min(5));
            self.locked = self.locked.saturating_add(1);
            return Some(pause.min(MAX_LOCKED_PAUSE).mul_f64(1.0 - random / 4.0));
        }
        self.locked = 0;
        let is_retryable = answer.status == 429 || (500..=599).contains(&answer.status);
        if !is_retryable || !answer.may_retry {
            return None;
        }
        // A limit of the tenant, no worker, no store: that passes, and says nothing about the line.
        let is_refused_for_now = matches!(answer.status, 429 | 503);
        if let Some(after) = answer.retry_after.filter(|_| is_refused_for_now) {
            let after = after.clamp(FIRST_PAUSE, MAX_RETRY_AFTER);
            // Lines that were refused together do not come back together.
            return Some(after.mul_f64(1.0 + random / 4.0));
        }
        if self.counted >= MAX_COUNTED {
            return None;
        }
        let pause = FIRST_PAUSE * (1 << self.counted);
        self.counted += 1;
        Some(pause.mul_f64(1.0 - random / 2.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, retry_after: Option<u64>) -> LineAnswer {
        LineAnswer {
            status,
            request_id: "wr-1".to_owned(),
            retry_after: retry_after.map(Duration::from_secs),
            may_retry: true,
            is_locked: false,
            body: Default::default(),
        }
    }

    /// The pauses in seconds until the answer is the line's result, ten at most.
    fn pauses(answer: &LineAnswer, random: f64) -> Vec<f64> {
        let mut tries = Tries::default();
        let pauses = std::iter::from_fn(|| tries.on_answer(answer, random));
        pauses.take(10).map(|pause| pause.as_secs_f64()).collect()
    }

    #[test]
    fn an_engine_that_fails_is_asked_again_five_times() {
        for status in [500, 502, 504, 529, 429, 503] {
            let found = pauses(&answer(status, None), 0.0);
            assert_eq!(found, [1.0, 2.0, 4.0, 8.0, 16.0], "{status}");
        }
        assert_eq!(pauses(&answer(502, None), 1.0), [0.5, 1.0, 2.0, 4.0, 8.0]);
        // Only a refusal says when to come back.
        assert_eq!(pauses(&answer(500, Some(9)), 0.0).len(), 5);
    }

    #[test]
    fn tries_before_this_run_count() {
        let failed = answer(502, None);
        let mut tries = Tries {
            counted: 4,
            locked: 0,
        };
        assert!(tries.on_answer(&failed, 0.0).is_some());
        assert_eq!(tries.counted, 5);
        assert!(tries.on_answer(&failed, 0.0).is_none());
    }

    #[test]
    fn an_answer_of_success_or_of_a_mistake_is_the_result() {
        for status in [200, 204, 301, 400, 404, 413, 422] {
            assert!(pauses(&answer(status, Some(1)), 0.0).is_empty(), "{status}");
        }
        let last = LineAnswer {
            may_retry: false,
            ..answer(502, None)
        };
        assert!(pauses(&last, 0.0).is_empty());
    }

    #[test]
    fn a_locked_conversation_is_waited_for_with_growing_pauses() {
        let locked = LineAnswer {
            is_locked: true,
            ..answer(503, None)
        };
        let expected = [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0, 30.0];
        assert_eq!(pauses(&locked, 0.0), expected);
        let mut tries = Tries::default();
        for answer in [&locked, &locked, &answer(502, None)] {
            assert!(tries.on_answer(answer, 0.0).is_some());
        }
        assert_eq!((tries.counted, tries.locked), (1, 0));
    }

    #[test]
    fn a_limit_is_waited_for_as_long_as_it_takes() {
        for status in [429, 503] {
            assert_eq!(pauses(&answer(status, Some(7)), 0.0), [7.0; 10]);
            assert_eq!(pauses(&answer(status, Some(0)), 0.0), [1.0; 10]);
            assert_eq!(pauses(&answer(status, Some(8)), 1.0), [10.0; 10]);
            assert_eq!(pauses(&answer(status, Some(9_999)), 0.0), [600.0; 10]);
        }
    }
}
