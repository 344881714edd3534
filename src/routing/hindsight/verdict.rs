//! Whether the choice was worse for long. Pure.

use std::collections::VecDeque;

use super::types::Took;

/// Ten minutes.
const MINUTES: usize = 10;
/// With fewer requests in them, chance decides.
const REQUESTS_MIN: usize = 200;
/// How many times as long as under the better of the other policies is worse: what is left out and learnt wrongly makes 5 %.
pub const WORSE: f64 = 1.1;
/// Below it the choice is no longer worse.
const AS_GOOD: f64 = 1.05;

/// What was played of the last minutes, of one model.
#[derive(Debug, Default)]
pub struct Verdict {
    minutes: VecDeque<Took>,
    is_worse: bool,
}

/// What a minute changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Worse,
    AsGood,
}

impl Verdict {
    /// Takes the next minute.
    pub fn add(&mut self, took: Took) -> Option<Change> {
        if self.minutes.len() == MINUTES {
            self.minutes.pop_front();
        }
        self.minutes.push_back(took);
        let sum = self.sum();
        if self.minutes.len() < MINUTES || sum.requests < REQUESTS_MIN {
            return None;
        }
        let ratio = sum.chosen / sum.least_load.min(sum.round_robin);
        let was_worse = self.is_worse;
        self.is_worse = ratio > if was_worse { AS_GOOD } else { WORSE };
        match (was_worse, self.is_worse) {
            (false, true) => Some(Change::Worse),
            (true, false) => Some(Change::AsGood),
            (false, false) | (true, true) => None,
        }
    }

    /// What the requests of the last ten minutes took.
    pub fn sum(&self) -> Took {
        let mut sum = Took::default();
        for minute in &self.minutes {
            sum.requests += minute.requests;
            sum.chosen += minute.chosen;
            sum.least_load += minute.least_load;
            sum.round_robin += minute.round_robin;
        }
        sum
    }
}
