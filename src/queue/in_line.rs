//! The lines of the requests that wait for room: each in that of the worker, or of its dp rank, for which it was last
//! seen to wait. Pure.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Instant;

use rustc_hash::FxHashMap;

use crate::fleet::waiting::{DueTime, WaitingByOwner};
use crate::ids::WorkerId;

/// Requests of one priority, counted by when they are due.
type ByDue = BTreeMap<Instant, u32>;

/// A request in the line of a cache owner.
pub type PlaceInLine = (WorkerId, DueTime);

/// Requests in one line, highest priority first.
type Line = BTreeMap<Reverse<i32>, ByDue>;

/// By cache owner: a worker, with those that wait for its dp ranks, and each of these.
#[derive(Debug, Default)]
pub struct InLine {
    by_owner: FxHashMap<WorkerId, Line>,
}

impl InLine {
    pub fn add(&mut self, (owner, due): PlaceInLine) {
        for counted in with_worker(owner) {
            let line = self.by_owner.entry(counted).or_default();
            let same = line.entry(Reverse(due.priority)).or_default();
            *same.entry(due.at).or_default() += 1;
        }
    }

    fn remove(&mut self, (owner, due): PlaceInLine) {
        let priority = Reverse(due.priority);
        for counted in with_worker(owner) {
            let Some(line) = self.by_owner.get_mut(&counted) else {
                continue;
            };
            let Some(same) = line.get_mut(&priority) else {
                continue;
            };
            if let Some(count) = same.get_mut(&due.at) {
                *count -= 1;
                if *count == 0 {
                    same.remove(&due.at);
                }
            }
            if same.is_empty() {
                line.remove(&priority);
            }
            if line.is_empty() {
                self.by_owner.remove(&counted);
            }
        }
    }

    /// Puts a request into the line where it waits now. `place` is where it has been.
    pub fn move_to(&mut self, place: &Cell<Option<PlaceInLine>>, new: Option<PlaceInLine>) {
        let before = place.replace(new);
        if before == new {
            return;
        }
        if let Some(before) = before {
            self.remove(before);
        }
        if let Some(new) = new {
            self.add(new);
        }
    }

    /// When the first request of a priority in an owner's line is due.
    pub fn first_due(&self, owner: WorkerId, priority: i32) -> Option<Instant> {
        let same = self.by_owner.get(&owner)?.get(&Reverse(priority))?;
        same.first_key_value().map(|(at, _)| *at)
    }

    /// The first one in an owner's line: of those of the highest priority there, the one that is due the earliest.
    pub fn first(&self, owner: WorkerId) -> Option<DueTime> {
        first_of(self.by_owner.get(&owner)?)
    }

    /// Adds the first of each line of some workers to those of other queues.
    pub fn add_first(&self, to: &mut WaitingByOwner, is_meant: impl Fn(WorkerId) -> bool) {
        let lines = self.by_owner.iter();
        for (owner, line) in lines.filter(|(owner, _)| is_meant(owner.worker())) {
            if let Some(first) = first_of(line) {
                to.add_first(*owner, first);
            }
        }
    }
}

fn first_of(line: &Line) -> Option<DueTime> {
    let (Reverse(priority), same) = line.first_key_value()?;
    let (at, _) = same.first_key_value()?;
    Some(DueTime {
        priority: *priority,
        at: *at,
    })
}

/// A cache owner, and its worker if it is a rank.
fn with_worker(owner: WorkerId) -> impl Iterator<Item = WorkerId> {
    let worker = owner.worker();
    let ranked = (owner != worker).then_some(owner);
    ranked.into_iter().chain([worker])
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::observe;

    #[test]
    fn the_first_in_line_is_of_the_highest_class_and_due_the_earliest() {
        let start = observe::now();
        let due = |priority, ms| DueTime {
            priority,
            at: start + Duration::from_millis(ms),
        };
        let (worker, other) = (WorkerId(3), WorkerId(4));
        let rank = worker.cache_owner(Some(1));
        let mut lines = InLine::default();
        let first = |lines: &InLine| [worker, rank, other].map(|owner| lines.first(owner));
        let waits = [
            (worker, due(0, 20)),
            (rank, due(0, 30)),
            (rank, due(0, 30)),
            (worker, due(1, 50)),
        ];
        let places = waits.map(|place| {
            let cell = Cell::new(None);
            lines.move_to(&cell, Some(place));
            cell
        });
        let of_rank = Some(due(0, 30));
        assert_eq!(first(&lines), [Some(due(1, 50)), of_rank, None]);
        assert_eq!(lines.first_due(worker, 0), Some(due(0, 20).at));
        assert_eq!(lines.first_due(worker, 2), None);
        lines.move_to(&places[3], None);
        lines.move_to(&places[0], Some((other, due(0, 20))));
        assert_eq!(first(&lines), [of_rank, of_rank, Some(due(0, 20))]);
        // Of two that are due at the same time one is left.
        lines.move_to(&places[1], None);
        lines.move_to(&places[1], None);
        assert_eq!(first(&lines)[..2], [of_rank, of_rank]);
        lines.move_to(&places[2], None);
        lines.move_to(&places[0], None);
        assert!(lines.by_owner.is_empty());
    }

    #[test]
    fn what_waits_in_several_queues_has_one_first_request() {
        let start = observe::now();
        let due = |priority, ms| DueTime {
            priority,
            at: start + Duration::from_millis(ms),
        };
        let (worker, other) = (WorkerId(3), WorkerId(4));
        for (queues, expected) in [
            ([due(0, 20), due(0, 10)], due(0, 10)),
            ([due(0, 10), due(1, 20)], due(1, 20)),
            ([due(1, 20), due(0, 10)], due(1, 20)),
        ] {
            let mut first = WaitingByOwner::default();
            for due in queues {
                let mut lines = InLine::default();
                lines.add((worker, due));
                lines.add((other, due));
                lines.add_first(&mut first, |owner| owner == worker);
            }
            assert_eq!(first.first(worker), [expected]);
            assert!(first.first(other).is_empty());
        }
    }
}
