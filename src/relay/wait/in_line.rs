//! The lines of the requests that wait for room: each in that of the worker, or of its dp rank, for which it was last
//! seen to wait. Pure.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::fleet::waiting::{DueTime, FirstInLine, FirstOfPeers};
use crate::ids::WorkerId;

/// Requests of one priority, counted by when they are due.
type ByDue = BTreeMap<Instant, u32>;

/// A request in the line of a cache owner.
pub(super) type PlaceInLine = (WorkerId, DueTime);

/// By cache owner: a worker, with those that wait for its dp ranks, and each of these.
#[derive(Debug, Default)]
pub(super) struct InLine {
    /// Highest priority first.
    by_owner: FxHashMap<WorkerId, BTreeMap<Reverse<i32>, ByDue>>,
}

impl InLine {
    pub(super) fn add(&mut self, (owner, due): PlaceInLine) {
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
    pub(super) fn move_to(&mut self, place: &Cell<Option<PlaceInLine>>, new: Option<PlaceInLine>) {
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
    pub(super) fn first_due(&self, owner: WorkerId, priority: i32) -> Option<Instant> {
        let same = self.by_owner.get(&owner)?.get(&Reverse(priority))?;
        same.first_key_value().map(|(at, _)| *at)
    }

    /// Adds the first of each line to those of other queues.
    pub(super) fn add_first(&self, to: &mut FirstInLine) {
        for (owner, line) in &self.by_owner {
            let Some((priority, same)) = line.first_key_value() else {
                continue;
            };
            let Some((at, _)) = same.first_key_value() else {
                continue;
            };
            let first = DueTime {
                priority: priority.0,
                at: *at,
            };
            let known = to.entry(*owner).or_insert(first);
            let order = |due: &DueTime| (Reverse(due.priority), due.at);
            if order(&first) < order(known) {
                *known = first;
            }
        }
    }
}

/// One that seems due so much earlier or later than before is still taken for the same: reports are late now and then.
const LATE_MAX: Duration = Duration::from_millis(50);

/// Since when this replica lets the first one in another replica's line go first, by cache owner and priority. The
/// bound is against one that does not leave: once it is over, nobody here waits for that one any more. Its time goes on
/// while the worker is full.
#[derive(Debug, Default)]
pub(super) struct LetFirst {
    by_line: FxHashMap<(WorkerId, i32), (DueTime, Instant)>,
}

impl LetFirst {
    /// Forgets those that are not first any more: the next one there may be let go first as long.
    pub(super) fn keep(&mut self, peers_first: Option<&FxHashMap<WorkerId, FirstOfPeers>>) {
        self.by_line.retain(|(owner, _), (known, _)| {
            let firsts = peers_first.and_then(|peers| peers.get(owner));
            let mut firsts = firsts.into_iter().flatten();
            firsts.any(|first| first.is_within(LATE_MAX, *known))
        });
    }

    /// Since when `first` is let go first, which is so now.
    pub(super) fn since(&mut self, owner: WorkerId, first: DueTime, now: Instant) -> Instant {
        let line = self.by_line.entry((owner, first.priority));
        line.or_insert((first, now)).1
    }
}

/// A cache owner, and its worker if it is a rank.
fn with_worker(owner: WorkerId) -> impl Iterator<Item = WorkerId> {
    let worker = owner.worker();
    let ranked = (owner != worker).then_some(owner);
    ranked.into_iter().chain([worker])
}

#[cfg(test)]
mod tests {
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
        let first = |lines: &InLine| {
            let mut first = FirstInLine::default();
            lines.add_first(&mut first);
            [worker, rank, other].map(|owner| first.get(&owner).copied())
        };
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
    fn who_is_first_in_another_line_is_let_go_first_since_it_was_first_there() {
        let start = observe::now();
        let ms = Duration::from_millis;
        let worker = WorkerId(3);
        let mut let_first = LetFirst::default();
        let mut since = |at: u64, priority: i32, due: u64| {
            let first = DueTime {
                priority,
                at: start + ms(due),
            };
            let firsts = FirstOfPeers::from_iter([first]);
            let peers = FxHashMap::from_iter([(worker, firsts)]);
            let_first.keep(Some(&peers));
            let since = let_first.since(worker, first, start + ms(at));
            since.duration_since(start).as_millis()
        };
        assert_eq!([since(10, 0, 100), since(20, 0, 149)], [10, 10]);
        // It does not move along with small changes.
        assert_eq!([since(30, 0, 151), since(40, 0, 151)], [30, 30]);
        assert_eq!([since(50, 1, 151), since(60, 0, 151)], [50, 60]);
        let_first.keep(None);
        assert!(let_first.by_line.is_empty());
    }

    #[test]
    fn what_waits_in_several_queues_has_one_first_request() {
        let start = observe::now();
        let due = |priority, ms| DueTime {
            priority,
            at: start + Duration::from_millis(ms),
        };
        let worker = WorkerId(3);
        for (queues, expected) in [
            ([due(0, 20), due(0, 10)], due(0, 10)),
            ([due(0, 10), due(1, 20)], due(1, 20)),
            ([due(1, 20), due(0, 10)], due(1, 20)),
        ] {
            let mut first = FirstInLine::default();
            for due in queues {
                let mut lines = InLine::default();
                lines.add((worker, due));
                lines.add_first(&mut first);
            }
            assert_eq!(first[&worker], expected);
        }
    }
}
