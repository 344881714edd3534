//! What the log says of others that come and go, so that one behind a slow link is not said to be gone once a second. What is
//! worse than was said is said at once, and that it is well again only once it has been well for a while. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// One that was not heard of for so long is forgotten: it is another process then.
const FORGET_AFTER: Duration = Duration::from_secs(600);
/// More than there are replicas or addresses.
const ROWS_MAX: usize = 1_024;

/// How one of the others is, from good to bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    Well,
    /// Silent, or not reached.
    Poor,
    /// Lost, or refused.
    Lost,
}

#[derive(Debug)]
struct Row {
    said: Level,
    /// Since when it is well, if it is.
    well_since: Option<Instant>,
    seen_at: Instant,
}

/// The last that was said of each.
#[derive(Debug)]
pub(super) struct Said<K> {
    /// Whoever was well for so long is well again.
    calm: Duration,
    rows: BTreeMap<K, Row>,
}

impl<K: Ord + Clone> Said<K> {
    pub(super) fn new(calm: Duration) -> Self {
        Self {
            calm,
            rows: BTreeMap::new(),
        }
    }

    /// True if anything bad was said of it that was not taken back.
    pub(super) fn is_bad(&self, of: &K) -> bool {
        self.rows.get(of).is_some_and(|row| row.said > Level::Well)
    }

    /// One of the others is so now. Returns what is to be said, if anything is.
    pub(super) fn observe(&mut self, now: Instant, of: &K, level: Level) -> Option<Level> {
        if !self.rows.contains_key(of) {
            if level == Level::Well {
                // As is supposed of everybody.
                return None;
            }
            self.make_room(now);
        }
        let row = self.rows.entry(of.clone()).or_insert(Row {
            said: Level::Well,
            well_since: None,
            seen_at: now,
        });
        row.seen_at = now;
        let calm_since = |since: Instant| now.saturating_duration_since(since) >= self.calm;
        let is_calm = row.well_since.is_some_and(calm_since);
        let said = row.said;
        if is_calm {
            row.said = Level::Well;
        }
        if level == Level::Well {
            row.well_since.get_or_insert(now);
            return (row.said != said).then_some(Level::Well);
        }
        row.well_since = None;
        let is_worse = level > row.said;
        row.said = row.said.max(level);
        is_worse.then_some(level)
    }

    /// It has left.
    pub(super) fn forget(&mut self, of: &K) {
        self.rows.remove(of);
    }

    fn make_room(&mut self, now: Instant) {
        self.rows
            .retain(|_, row| now.saturating_duration_since(row.seen_at) < FORGET_AFTER);
        if self.rows.len() >= ROWS_MAX {
            self.rows.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;

    const CALM: Duration = Duration::from_secs(10);

    /// What is said if something is so at each of these seconds.
    fn check(observed: &[(u64, Level)], expected: &[(u64, Level)]) {
        let (mut said, start) = (Said::new(CALM), observe::now());
        let lines = observed.iter().filter_map(|(second, level)| {
            let line = said.observe(start + Duration::from_secs(*second), &(), *level)?;
            Some((*second, line))
        });
        assert_eq!(lines.collect::<Vec<_>>(), expected, "{observed:?}");
    }

    #[test]
    fn each_change_is_said_once_and_the_good_ones_when_they_last() {
        use Level::{Lost, Poor, Well};
        check(&[(0, Well), (1, Well), (30, Well)], &[]);
        check(&[(0, Poor), (1, Poor), (99, Poor)], &[(0, Poor)]);
        check(
            &[(0, Poor), (2, Lost), (3, Poor), (4, Lost)],
            &[(0, Poor), (2, Lost)],
        );
        check(
            &[
                (0, Poor),
                (1, Well),
                (5, Well),
                (11, Well),
                (12, Well),
                (13, Poor),
            ],
            &[(0, Poor), (11, Well), (13, Poor)],
        );
        // Nobody looked meanwhile.
        check(
            &[(0, Lost), (1, Well), (20, Lost)],
            &[(0, Lost), (20, Lost)],
        );
    }

    #[test]
    fn one_that_flaps_for_an_hour_is_one_line() {
        let flapping = (0..3_600).map(|second| match second % 3 {
            0 => (second, Level::Poor),
            1 if second % 7 == 0 => (second, Level::Lost),
            _ => (second, Level::Well),
        });
        let flapping: Vec<_> = flapping.collect();
        check(&flapping, &[(0, Level::Poor), (7, Level::Lost)]);
    }

    #[test]
    fn those_that_never_come_back_are_forgotten() {
        let (mut said, mut now) = (Said::new(CALM), observe::now());
        for id in 0..10 * ROWS_MAX {
            now += Duration::from_secs(1);
            assert_eq!(said.observe(now, &id, Level::Lost), Some(Level::Lost));
            assert!(said.rows.len() <= ROWS_MAX);
        }
        assert!(said.is_bad(&(10 * ROWS_MAX - 1)));
        said.forget(&(10 * ROWS_MAX - 1));
        assert!(!said.is_bad(&(10 * ROWS_MAX - 1)));
    }
}
