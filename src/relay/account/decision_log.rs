//! A sample of the latest decisions with their candidates, for operators. Bounded; has no text of a prompt. Reads no
//! clock: a task allows so many decisions to be recorded from time to time.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};

use parking_lot::Mutex;
use serde::Serialize;

use super::explanation::Explanation;

/// The decisions that are kept. Each is about 10 KB with all its candidates.
const MAX_DECISIONS: usize = 200;

#[derive(Debug, Serialize)]
pub struct RecordedDecision {
    /// Its place among the recorded ones, from 1.
    pub number: u64,
    pub at_unix_ms: u64,
    /// The id that the router gave the request: it is in the logs, too.
    pub request_id: String,
    pub api: &'static str,
    /// From 1; a later one is a retry.
    pub attempt: u32,
    /// What the tenant had left of its limits after this request, if it has any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitsLeft>,
    /// How long the request waited for a worker with room.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_ms: Option<u64>,
    /// The longest cached prefix that any candidate has of the prompt.
    pub longest_cached_tokens: u32,
    #[serde(flatten)]
    pub explanation: Explanation,
}

/// What is left of a tenant's limits: of requests, and of tokens, the one with the least.
#[derive(Debug, Serialize)]
pub struct LimitsLeft {
    pub tenant: String,
    pub remaining_requests: Option<u64>,
    pub remaining_tokens: Option<u64>,
}

/// The latest recorded decisions. Nothing is recorded until [`DecisionLog::allow`] is called.
#[derive(Debug, Default)]
pub struct DecisionLog {
    /// How many may be recorded until the next call of [`DecisionLog::allow`].
    allowance: AtomicU32,
    /// One comparison with random workers is due, however few requests there are.
    is_comparison_due: AtomicBool,
    recorded: Mutex<Recorded>,
}

#[derive(Debug, Default)]
struct Recorded {
    last: u64,
    decisions: VecDeque<Arc<RecordedDecision>>,
}

impl DecisionLog {
    /// Lets the next `decisions` be recorded, and one request be compared with random workers.
    pub fn allow(&self, decisions: u32) {
        self.allowance.store(decisions, Relaxed);
        self.is_comparison_due.store(true, Relaxed);
    }

    /// True if this decision is to be recorded.
    pub(in crate::relay) fn take(&self) -> bool {
        // No more than a load for nearly every request.
        self.allowance
            .fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1))
            .is_ok()
    }

    pub(in crate::relay) fn take_comparison(&self) -> bool {
        self.is_comparison_due.load(Relaxed) && self.is_comparison_due.swap(false, Relaxed)
    }

    pub(in crate::relay) fn add(&self, decision: impl FnOnce(u64) -> RecordedDecision) {
        let mut recorded = self.recorded.lock();
        recorded.last += 1;
        let decision = decision(recorded.last);
        if recorded.decisions.len() == MAX_DECISIONS {
            recorded.decisions.pop_front();
        }
        recorded.decisions.push_back(Arc::new(decision));
    }

    /// The decisions after one, oldest first.
    pub fn after(&self, number: u64) -> Vec<Arc<RecordedDecision>> {
        let recorded = self.recorded.lock();
        let later = recorded
            .decisions
            .iter()
            .skip_while(|decision| decision.number <= number);
        later.cloned().collect()
    }

    /// `None` if it is not among the latest.
    pub fn get(&self, number: u64) -> Option<Arc<RecordedDecision>> {
        let recorded = self.recorded.lock();
        let mut decisions = recorded.decisions.iter();
        decisions
            .find(|decision| decision.number == number)
            .cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decision(number: u64) -> RecordedDecision {
        RecordedDecision {
            number,
            at_unix_ms: 0,
            request_id: String::new(),
            api: "chat",
            attempt: 1,
            limits: None,
            queue_ms: None,
            longest_cached_tokens: 0,
            explanation: Explanation::default(),
        }
    }

    #[test]
    fn no_more_are_recorded_than_were_allowed() {
        let log = DecisionLog::default();
        assert!(!log.take());
        log.allow(2);
        assert_eq!([log.take(), log.take(), log.take()], [true, true, false]);
        log.allow(0);
        assert!(!log.take());
    }

    #[test]
    fn one_comparison_is_due_each_time() {
        let log = DecisionLog::default();
        assert!(!log.take_comparison());
        log.allow(0);
        assert_eq!(
            [log.take_comparison(), log.take_comparison()],
            [true, false]
        );
    }

    #[test]
    fn the_oldest_decisions_are_dropped() {
        let log = DecisionLog::default();
        for _ in 0..MAX_DECISIONS + 5 {
            log.add(decision);
        }
        assert_eq!(log.after(0).len(), MAX_DECISIONS);
        assert_eq!(log.after(0)[0].number, 6);
        let last = MAX_DECISIONS as u64 + 5;
        let numbers: Vec<u64> = log
            .after(last - 2)
            .iter()
            .map(|decision| decision.number)
            .collect();
        assert_eq!(numbers, [last - 1, last]);
        assert!(log.get(5).is_none());
        assert_eq!(log.get(6).unwrap().number, 6);
    }
}
