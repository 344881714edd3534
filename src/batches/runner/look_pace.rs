//! When this replica looks for work again, and whether that look reads the first batches once more: seldom while most of them
//! are left to other replicas. Pure.

use std::time::{Duration, Instant};

/// Documents that are read at once. They are those whose due times are the earliest; a claim sets a later one.
pub(super) const MAX_DUE: usize = 128;

/// Time between two looks for work while there is some, and else. What was created here is looked at at once.
const BUSY_INTERVAL: Duration = Duration::from_millis(500);
const IDLE_INTERVAL: Duration = Duration::from_secs(1);

/// Time between two looks for work while so many batches are left to other replicas that a look reads more than one
/// page of them, and it has seen all. Until it has, the first ones are read again no sooner than that. What ends or is
/// created here is looked at at once all the same.
const LEFT_INTERVAL: Duration = Duration::from_secs(10);

/// How far the looks have come.
#[derive(Debug)]
pub(super) struct LookPace {
    /// How many of the batches that the last look at the first ones has read are left to other replicas.
    pub(super) left: usize,
    /// The place from which the next look goes on, of batches that are not among the first. 0: the last one has seen all.
    pub(super) behind: usize,
    /// When a look at the first batches began last.
    first_read: Instant,
}

impl LookPace {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            left: 0,
            behind: 0,
            first_read: now,
        }
    }

    /// Whether the next look goes on behind the first batches and does not read these again, since most of them are left
    /// to other replicas.
    pub(super) fn goes_on_behind(&self, now: Instant) -> bool {
        let since_first = now.saturating_duration_since(self.first_read);
        self.left >= MAX_DUE && self.behind > 0 && since_first < LEFT_INTERVAL
    }

    /// A look at the first batches begins.
    pub(super) fn on_look_at_first(&mut self, now: Instant) {
        self.first_read = now;
    }

    /// The first batches were read, and so many of them are left to other replicas.
    pub(super) fn on_first(&mut self, left: usize) {
        self.left = left;
    }

    /// Time until the next look. While looks go on behind the first batches, what waits there is not to wait longer.
    pub(super) fn interval(&self, is_idle: bool) -> Duration {
        if self.left >= MAX_DUE && self.behind == 0 {
            LEFT_INTERVAL
        } else if is_idle {
            IDLE_INTERVAL
        } else {
            BUSY_INTERVAL
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;

    fn pace(left: usize, behind: usize, first_read: Instant) -> LookPace {
        LookPace {
            left,
            behind,
            first_read,
        }
    }

    #[test]
    fn looks_are_rare_while_many_batches_are_left_to_others() {
        let now = observe::now();
        let interval = |is_idle, left, behind| pace(left, behind, now).interval(is_idle);
        for is_idle in [true, false] {
            assert!(interval(is_idle, MAX_DUE - 1, 0) < LEFT_INTERVAL);
            assert_eq!(interval(is_idle, MAX_DUE, 0), LEFT_INTERVAL);
            // There are more than a look has seen.
            assert!(interval(is_idle, MAX_DUE, 2 * MAX_DUE) < LEFT_INTERVAL);
        }
    }

    #[test]
    fn the_first_batches_are_seldom_read_again_while_many_are_left_to_others() {
        let now = observe::now();
        let short = LEFT_INTERVAL / 2;
        for (left, behind, since_first, expected) in [
            (MAX_DUE, MAX_DUE, short, true),
            (MAX_DUE, MAX_DUE, LEFT_INTERVAL, false),
            (MAX_DUE, 0, short, false),
            (MAX_DUE - 1, MAX_DUE, short, false),
        ] {
            let goes_on = pace(left, behind, now).goes_on_behind(now + since_first);
            assert_eq!(goes_on, expected, "{left} {behind} {since_first:?}");
        }
    }
}
