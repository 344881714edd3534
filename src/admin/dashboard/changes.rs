//! What happened to the fleet: workers that came, left, failed and came back, and changes of the policy. Found by
//! comparing the fleet with what it was a moment before. Pure.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;
use serde::Serialize;

use crate::fleet::health::Health;
use crate::http::circuit_breaker::State;
use crate::observe::metrics::words;

const MAX_CHANGES: usize = 100;
/// More changes of one kind at a time are one entry.
const MAX_ALIKE: usize = 4;
/// Workers that such an entry names.
const MAX_NAMED: usize = 3;

/// What is compared of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Condition {
    pub(super) health: Health,
    pub(super) breaker: State,
    pub(super) is_draining: bool,
}

words! {
    /// With what is said of the workers after their names.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    #[serde(rename_all = "snake_case")]
    pub(super) enum Kind {
        Joined = "joined the fleet",
        Left = "left the fleet",
        Up = "up",
        Down = "down",
        BreakerOpen = "circuit breaker open",
        BreakerClosed = "circuit breaker closed",
        Draining = "draining",
        Undrained = "takes requests again",
        Policy = "",
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Change {
    pub(super) number: u64,
    pub(super) at_unix_ms: u64,
    pub(super) kind: Kind,
    pub(super) text: String,
}

/// The latest changes, oldest first.
#[derive(Debug, Default)]
pub(super) struct Changes {
    workers: Option<FxHashMap<String, Condition>>,
    policy: Option<&'static str>,
    /// The number of the latest one.
    pub(super) last: u64,
    changes: VecDeque<Change>,
}

impl Changes {
    /// Compares the fleet with the one of the last call. The first call has nothing to compare with, except for the
    /// policy.
    pub(super) fn observe<'a>(
        &mut self,
        at_unix_ms: u64,
        workers: impl Iterator<Item = (&'a str, Condition)>,
        policy: &'static str,
    ) {
        match self.policy.replace(policy) {
            Some(before) if before != policy => {
                self.add(
                    at_unix_ms,
                    Kind::Policy,
                    format!("policy {before} → {policy}"),
                );
            }
            None => self.add(at_unix_ms, Kind::Policy, format!("policy {policy}")),
            Some(_) => {}
        }
        let now: FxHashMap<String, Condition> = workers
            .map(|(name, condition)| (name.to_owned(), condition))
            .collect();
        if let Some(before) = self.workers.take() {
            for kind in Kind::ALL {
                let found = workers_with(kind, &before, &now);
                self.add_workers(at_unix_ms, kind, found);
            }
        }
        self.workers = Some(now);
    }

    pub(super) fn after(&self, number: u64) -> Vec<&Change> {
        let changes = self.changes.iter();
        changes.filter(|change| change.number > number).collect()
    }

    fn add_workers(&mut self, at_unix_ms: u64, kind: Kind, mut names: Vec<&str>) {
        names.sort_unstable();
        if names.len() <= MAX_ALIKE {
            for name in names {
                self.add(at_unix_ms, kind, format!("{name}: {}", kind.as_str()));
            }
            return;
        }
        let (count, named) = (names.len(), names[..MAX_NAMED].join(", "));
        let text = format!("{count} workers: {} ({named}, …)", kind.as_str());
        self.add(at_unix_ms, kind, text);
    }

    fn add(&mut self, at_unix_ms: u64, kind: Kind, text: String) {
        self.last += 1;
        if self.changes.len() == MAX_CHANGES {
            self.changes.pop_front();
        }
        self.changes.push_back(Change {
            number: self.last,
            at_unix_ms,
            kind,
            text,
        });
    }
}

fn workers_with<'a>(
    kind: Kind,
    before: &'a FxHashMap<String, Condition>,
    now: &'a FxHashMap<String, Condition>,
) -> Vec<&'a str> {
    if kind == Kind::Left {
        let left = before.keys().filter(|name| !now.contains_key(*name));
        return left.map(String::as_str).collect();
    }
    let has_changed = |name: &String, now: &Condition| {
        let Some(before) = before.get(name) else {
            return kind == Kind::Joined;
        };
        match kind {
            Kind::Up => now.health == Health::Up && before.health != Health::Up,
            Kind::Down => now.health == Health::Down && before.health != Health::Down,
            // Half-open is a trial within an outage, and no change of its own.
            Kind::BreakerOpen => now.breaker == State::Open && before.breaker == State::Closed,
            Kind::BreakerClosed => now.breaker == State::Closed && before.breaker != State::Closed,
            Kind::Draining => now.is_draining && !before.is_draining,
            Kind::Undrained => !now.is_draining && before.is_draining,
            Kind::Joined | Kind::Left | Kind::Policy => false,
        }
    };
    let changed = now
        .iter()
        .filter(|(name, condition)| has_changed(name, condition));
    changed.map(|(name, _)| name.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const UP: Condition = Condition {
        health: Health::Up,
        breaker: State::Closed,
        is_draining: false,
    };

    fn texts(steps: &[&[(&str, Condition)]]) -> Vec<String> {
        let mut changes = Changes::default();
        for (at, workers) in (0..).zip(steps) {
            changes.observe(at, workers.iter().copied(), "cache_aware");
        }
        let found = changes.after(1);
        found.iter().map(|change| change.text.clone()).collect()
    }

    #[test]
    fn each_change_of_a_worker_is_one_entry() {
        let down = Condition {
            health: Health::Down,
            ..UP
        };
        let open = Condition {
            breaker: State::Open,
            ..UP
        };
        let half_open = Condition {
            breaker: State::HalfOpen,
            ..UP
        };
        let draining = Condition {
            is_draining: true,
            ..UP
        };
        let check = |steps: &[&[(&str, Condition)]], expected: &[&str]| {
            assert_eq!(texts(steps), expected, "{steps:?}");
        };
        check(&[&[("a", UP)], &[("a", UP)]], &[]);
        check(
            &[&[("a", UP)], &[("a", down)], &[("a", UP)]],
            &["a: down", "a: up"],
        );
        check(
            &[
                &[("a", UP)],
                &[("a", open)],
                &[("a", half_open)],
                &[("a", open)],
                &[("a", UP)],
            ],
            &["a: circuit breaker open", "a: circuit breaker closed"],
        );
        check(
            &[&[("a", UP)], &[("a", draining), ("b", UP)], &[("b", UP)]],
            &["b: joined the fleet", "a: draining", "a: left the fleet"],
        );
    }

    #[test]
    fn many_changes_at_once_are_one_entry() {
        let names: Vec<String> = (0..50).map(|n| format!("w{n:02}")).collect();
        let all: Vec<(&str, Condition)> = names.iter().map(|name| (&**name, UP)).collect();
        let expected = "50 workers: joined the fleet (w00, w01, w02, …)";
        assert_eq!(texts(&[&[], &all]), [expected]);
    }

    #[test]
    fn the_policy_and_its_changes_are_entries() {
        let mut changes = Changes::default();
        for policy in ["round_robin", "round_robin", "cache_aware"] {
            changes.observe(0, std::iter::empty(), policy);
        }
        let found = changes.after(0);
        let texts: Vec<&str> = found.iter().map(|change| &*change.text).collect();
        let expected = ["policy round_robin", "policy round_robin → cache_aware"];
        assert_eq!(texts, expected);
    }

    #[test]
    fn the_oldest_changes_are_dropped() {
        let mut changes = Changes::default();
        for number in 0..150 {
            let policy = ["a", "b"][number % 2];
            changes.observe(0, std::iter::empty(), policy);
        }
        assert_eq!(changes.after(0).len(), MAX_CHANGES);
        assert_eq!(changes.last, 150);
        assert_eq!(changes.after(149)[0].number, 150);
    }
}
