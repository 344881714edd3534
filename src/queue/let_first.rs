//! Which requests that wait in other replicas go before those that wait here. Pure.
//!
//! Each replica reports when the first request in each of its lines is due. A request here whose worker has room waits
//! on while another replica's first one for that worker is of its class, and due before all of the class in the line
//! here. So replicas agree on which of them is next, whatever that one sends then by the turns of its tenants.

use std::cell::Cell;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use super::in_line::InLine;
use super::types::Timing;
use crate::fleet::waiting::DueTime;
use crate::ids::WorkerId;

/// For how long a replica at most lets the first one in another replica's line go first, and each of its requests all
/// of those, one after another. The other replica may be kept from sending it by what this one does not know, such as
/// the turns of its tenants or a worker that it leaves out; and one tenant's flood there may never end. Replicas hear
/// of each other within some 10 ms, so who is sent at all is sent long before.
///
/// A flood there can delay each request here by up to this time, while requests of the flood are due earlier.
const STANDS_BEHIND_MAX: Duration = Duration::from_secs(1);

/// One that seems due so much earlier or later than before is still taken for the same: reports are late now and then.
const LATE_MAX: Duration = Duration::from_millis(50);

/// A cache owner, and the priority of the requests in its line that are meant.
type LineOfClass = (WorkerId, i32);

/// How long a waiting request lets those of other replicas go first.
#[derive(Debug)]
pub struct Patience {
    /// It lets any of them go first.
    has_any: bool,
    /// Since when it lets one of another replica go first, or has once done so.
    since: Cell<Option<Instant>>,
}

impl Patience {
    /// A request whose worker had room when it entered lets none go first.
    pub fn new(had_room: bool) -> Self {
        Self {
            has_any: !had_room,
            since: Cell::new(None),
        }
    }
}

/// What becomes of a waiting request whose worker has room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// It is sent.
    Next,
    /// It is sent before one of another replica that is due earlier: it has let that one, or several one after another,
    /// go first for as long as it may.
    Overtakes,
    /// It waits on beside its line: the worker stays open for those that let nobody go first.
    Waits,
}

/// The first ones in other replicas' lines that are let go first.
#[derive(Debug, Default)]
pub struct LetFirst {
    /// Since when each of them is let go first. The bound is against one that does not leave: once it is over, nobody
    /// here waits for that one any more. Its time goes on while the worker is full.
    by_line: FxHashMap<LineOfClass, (DueTime, Instant)>,
    /// The lines and priorities of those that wait for them, as far as the walk has come.
    waited_in: Vec<LineOfClass>,
}

impl LetFirst {
    /// Begins a walk over the waiting requests. Forgets those that are not first any more, by what `first_of_peers`
    /// says of an owner's line: the next one there may be let go first as long.
    pub fn begin_walk<'a>(&mut self, first_of_peers: impl Fn(WorkerId) -> &'a [DueTime]) {
        self.waited_in.clear();
        self.by_line.retain(|(owner, _), (known, _)| {
            let mut firsts = first_of_peers(*owner).iter();
            firsts.any(|first| first.is_within(LATE_MAX, *known))
        });
    }

    /// Whether a request whose worker, or dp rank, has room waits on, so that another replica sends the first one in
    /// its line there: one of `first_of_peers`. Lower classes wait behind it. A request with a target does not wait for
    /// others, nor does one that would be refused for it. `in_line`: the lines here, without those that this walk has
    /// sent.
    pub fn turn(
        &mut self,
        now: Instant,
        patience: &Patience,
        timing: Timing,
        owner: WorkerId,
        in_line: &InLine,
        first_of_peers: &[DueTime],
    ) -> Turn {
        // One whose wait ends soon would be refused because it has let others go first.
        let is_pressed = timing.wait_left <= STANDS_BEHIND_MAX;
        if !patience.has_any || timing.time_left.is_some() || is_pressed {
            return Turn::Next;
        }
        let DueTime { priority, at } = timing.due;
        let line = (owner, priority);
        let is_higher = |(other, class): &LineOfClass| {
            *class > priority && (*other == owner || other.worker() == owner)
        };
        if self.waited_in.iter().any(is_higher) {
            return self.wait_in(line);
        }
        let own_first = in_line.first_due(owner, priority);
        let own_first = own_first.map_or(at, |own_first| own_first.min(at));
        let is_before = |first: &&DueTime| first.priority == priority && first.at < own_first;
        let Some(first) = first_of_peers.iter().find(is_before) else {
            return Turn::Next;
        };
        let own_since = patience.since.get().unwrap_or(now);
        patience.since.set(Some(own_since));
        // Only the earliest first one of all replicas is known: while it does not leave, those behind it are let go
        // first no more either.
        let since = self.since(owner, *first, now).min(own_since);
        if now.saturating_duration_since(since) >= STANDS_BEHIND_MAX {
            return Turn::Overtakes;
        }
        self.wait_in(line)
    }

    /// Whether a request that was seen in this line not long ago waits on beside it, without another look at where it
    /// would be sent: this walk has come to one of its class that waits there, and it does so by [`Self::turn`], too.
    pub fn waits_on(
        &mut self,
        now: Instant,
        patience: &Patience,
        timing: Timing,
        owner: WorkerId,
        in_line: &InLine,
        first_of_peers: &[DueTime],
    ) -> bool {
        if !self.waited_in.contains(&(owner, timing.due.priority)) {
            return false;
        }
        let turn = self.turn(now, patience, timing, owner, in_line, first_of_peers);
        turn == Turn::Waits
    }

    /// Whether one of those the walk has come to waits beside a line of a worker, or of one of its dp ranks.
    pub fn is_waited_for(&self, worker: WorkerId) -> bool {
        let mut waited_in = self.waited_in.iter();
        waited_in.any(|(owner, _)| owner.worker() == worker)
    }

    /// Whether one of those the last walk came to waits beside this line. Those that are pinned to a worker's ranks are
    /// in the line of the worker, too.
    pub fn is_waited_in(&self, owner: WorkerId) -> bool {
        let mut waited_in = self.waited_in.iter();
        waited_in.any(|(line, _)| *line == owner || line.worker() == owner)
    }

    fn wait_in(&mut self, line: LineOfClass) -> Turn {
        if !self.waited_in.contains(&line) {
            self.waited_in.push(line);
        }
        Turn::Waits
    }

    /// Since when `first` is let go first, which is so now.
    fn since(&mut self, owner: WorkerId, first: DueTime, now: Instant) -> Instant {
        let line = self.by_line.entry((owner, first.priority));
        line.or_insert((first, now)).1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;

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
            let firsts = [first];
            let_first.begin_walk(|_| &firsts);
            let since = let_first.since(worker, first, start + ms(at));
            since.duration_since(start).as_millis()
        };
        assert_eq!([since(10, 0, 100), since(20, 0, 149)], [10, 10]);
        // It does not move along with small changes.
        assert_eq!([since(30, 0, 151), since(40, 0, 151)], [30, 30]);
        assert_eq!([since(50, 1, 151), since(60, 0, 151)], [50, 60]);
        let_first.begin_walk(|_| &[]);
        assert!(let_first.by_line.is_empty());
    }

    #[test]
    fn a_flood_delays_each_request_for_a_second_while_it_is_due_earlier() {
        let start = observe::now();
        let ms = Duration::from_millis;
        let due = |after| DueTime {
            priority: 0,
            at: start + ms(after),
        };
        let timing = Timing {
            time_left: None,
            wait_left: ms(60_000),
            due: due(5_000),
        };
        let (mut let_first, in_line) = (LetFirst::default(), InLine::default());
        let [one, next, last] = [false; 3].map(Patience::new);
        // Each time another one is first there.
        for (at, patience, first, expected) in [
            (0, &one, 0, Turn::Waits),
            (990, &one, 100, Turn::Waits),
            (1_000, &one, 200, Turn::Overtakes),
            (1_010, &next, 300, Turn::Waits),
            (2_000, &next, 400, Turn::Waits),
            (2_010, &next, 500, Turn::Overtakes),
            (2_020, &last, 6_000, Turn::Next),
        ] {
            let (now, firsts) = (start + ms(at), [due(first)]);
            let_first.begin_walk(|_| &firsts);
            let turn = let_first.turn(now, patience, timing, WorkerId(3), &in_line, &firsts);
            assert_eq!(turn, expected, "{at}");
        }
    }

    #[test]
    fn who_had_room_has_a_target_or_may_not_wait_long_lets_nobody_go_first() {
        let start = observe::now();
        let ms = Duration::from_millis;
        let due = |at| DueTime { priority: 0, at };
        let long = ms(60_000);
        for (what, had_room, time_left, wait_left, expected) in [
            ("may wait long", false, None, long, Turn::Waits),
            ("had room", true, None, long, Turn::Next),
            ("has a target", false, Some(long), long, Turn::Next),
            (
                "more than a second is left",
                false,
                None,
                ms(1_001),
                Turn::Waits,
            ),
            ("a second is left", false, None, ms(1_000), Turn::Next),
        ] {
            let timing = Timing {
                time_left,
                wait_left,
                due: due(start),
            };
            let (patience, first) = (Patience::new(had_room), due(start - ms(1)));
            let (mut let_first, in_line) = (LetFirst::default(), InLine::default());
            let owner = WorkerId(3);
            let turn = let_first.turn(start, &patience, timing, owner, &in_line, &[first]);
            assert_eq!(turn, expected, "{what}");
        }
    }

    #[test]
    fn behind_one_that_waits_in_its_line_a_request_waits_on_without_another_look() {
        let start = observe::now();
        let ms = Duration::from_millis;
        let due = |at| DueTime { priority: 0, at };
        let (owner, firsts) = (WorkerId(3), [due(start - ms(1))]);
        let (mut let_first, in_line) = (LetFirst::default(), InLine::default());
        let timing = |time_left| Timing {
            time_left,
            wait_left: ms(60_000),
            due: due(start),
        };
        let patience = Patience::new(false);
        let waits_on = |let_first: &mut LetFirst, owner: WorkerId, time_left| {
            let timing = timing(time_left);
            let_first.waits_on(start, &patience, timing, owner, &in_line, &firsts)
        };
        // It may be the first one itself.
        assert!(!waits_on(&mut let_first, owner, None));
        let before = Patience::new(false);
        let turn = let_first.turn(start, &before, timing(None), owner, &in_line, &firsts);
        assert_eq!(turn, Turn::Waits);
        assert!(waits_on(&mut let_first, owner, None));
        assert!(!waits_on(&mut let_first, owner, Some(ms(60_000))));
        assert!(!waits_on(&mut let_first, WorkerId(4), None));
        let_first.begin_walk(|_| &firsts);
        assert!(!waits_on(&mut let_first, owner, None));
    }

    #[test]
    fn whoever_waits_beside_the_line_of_a_rank_waits_beside_that_of_its_worker() {
        let worker = WorkerId(3);
        let ranks = [0, 1].map(|rank| worker.cache_owner(Some(rank)));
        let mut let_first = LetFirst::default();
        assert_eq!(let_first.wait_in((ranks[0], 0)), Turn::Waits);
        let lines = [ranks[0], worker, ranks[1], WorkerId(4)];
        let waited_in = lines.map(|line| let_first.is_waited_in(line));
        assert_eq!(waited_in, [true, true, false, false]);
    }

    #[test]
    fn behind_one_that_waits_for_another_replica_only_lower_classes_of_its_worker_wait() {
        let start = observe::now();
        let ms = Duration::from_millis;
        let worker = WorkerId(3);
        let ranks = [0, 1].map(|rank| worker.cache_owner(Some(rank)));
        let (mut let_first, in_line) = (LetFirst::default(), InLine::default());
        let mut turn = |owner: WorkerId, priority: i32| {
            let due = DueTime {
                priority,
                at: start,
            };
            let timing = Timing {
                time_left: None,
                wait_left: ms(60_000),
                due,
            };
            // Another replica has one of this class that is due earlier.
            let first = DueTime {
                priority: 1,
                at: start - ms(1),
            };
            let patience = Patience::new(false);
            let_first.turn(start, &patience, timing, owner, &in_line, &[first])
        };
        assert_eq!(turn(worker, 0), Turn::Next);
        assert_eq!(
            [turn(ranks[0], 1), turn(ranks[0], 1)],
            [Turn::Waits, Turn::Waits]
        );
        assert_eq!(
            [turn(ranks[0], 0), turn(ranks[1], 0)],
            [Turn::Waits, Turn::Next]
        );
        // It may come to any rank.
        assert_eq!(
            [turn(worker, 0), turn(worker, 2)],
            [Turn::Waits, Turn::Next]
        );
        assert!(let_first.is_waited_for(worker) && !let_first.is_waited_for(WorkerId(4)));
    }
}
