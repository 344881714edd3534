//! Which workers did not answer a request to abort in time. Each of them has one place at a time, and all together have
//! at most so many, so that their aborts do not keep back those of all others, and an engine that is slow gets its own
//! all the same. Pure.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::ids::WorkerId;

/// A worker that did not answer in time counts as silent for so long, or until it answers one in time.
const SILENT_FOR: Duration = Duration::from_secs(10);

/// What waits for the place of one silent worker. With more, its engine notices the closed connections itself. At two
/// seconds each, these are half a minute or more, which gives health checks the time to find a worker that is frozen.
const MAX_WAITING: usize = 16;

/// What may be sent to workers now, and what waits for the place of a silent one.
#[derive(Debug)]
pub(super) struct SilentWorkers<T> {
    by_worker: FxHashMap<WorkerId, AbortsOfWorker<T>>,
    /// The workers for which something waits and nothing is on its way, in the order of their turns.
    without_place: VecDeque<WorkerId>,
    /// How many may be on their way to silent workers before another one is sent to such a worker.
    max_at_once: usize,
}

#[derive(Debug)]
struct AbortsOfWorker<T> {
    /// How many are on their way.
    count: usize,
    silent_until: Option<Instant>,
    waiting: VecDeque<T>,
}

#[must_use]
#[derive(Debug, PartialEq, Eq)]
pub(super) enum AbortTurn<T> {
    /// It is sent now. Its end is to be reported.
    Now(T),
    /// It comes back at the end of another one.
    Waits,
    /// Too many wait.
    Dropped,
}

impl<T> SilentWorkers<T> {
    /// `max_at_once`: at least one.
    pub(super) fn new(max_at_once: usize) -> Self {
        Self {
            by_worker: FxHashMap::default(),
            without_place: VecDeque::new(),
            max_at_once,
        }
    }

    pub(super) fn admit(&mut self, now: Instant, worker: WorkerId, abort: T) -> AbortTurn<T> {
        let has_place = self.without_place.is_empty() && self.has_place(now);
        let sending = self.by_worker.entry(worker).or_insert(AbortsOfWorker {
            count: 0,
            silent_until: None,
            waiting: VecDeque::new(),
        });
        if !sending.is_silent(now) || (sending.count == 0 && has_place) {
            sending.count += 1;
            AbortTurn::Now(abort)
        } else if sending.waiting.len() < MAX_WAITING {
            sending.waiting.push_back(abort);
            if sending.count == 0 && !self.without_place.contains(&worker) {
                self.without_place.push_back(worker);
            }
            AbortTurn::Waits
        } else {
            AbortTurn::Dropped
        }
    }

    /// One that was sent to a worker has ended, in time or not. Returns the one that is sent next.
    pub(super) fn on_ended(&mut self, now: Instant, worker: WorkerId, in_time: bool) -> Option<T> {
        let sending = self.by_worker.get_mut(&worker)?;
        sending.count = sending.count.saturating_sub(1);
        sending.silent_until = (!in_time).then(|| now + SILENT_FOR);
        if sending.is_silent(now) {
            let waits = sending.count == 0 && !sending.waiting.is_empty();
            if waits && !self.without_place.contains(&worker) {
                self.without_place.push_back(worker);
            }
        } else if let Some(next) = sending.start_next() {
            return Some(next);
        }
        // While any worker has no place, something is on its way: what ends starts the next.
        let next = self.start_without_place(now);
        // Workers that have left are forgotten as well.
        self.by_worker.retain(|_, sending| {
            sending.count > 0 || !sending.waiting.is_empty() || sending.is_silent(now)
        });
        next
    }

    /// Starts what waits for the worker whose turn it is, if there is a place for it.
    fn start_without_place(&mut self, now: Instant) -> Option<T> {
        while self.has_place(now) {
            let worker = self.without_place.pop_front()?;
            let sending = self.by_worker.get_mut(&worker);
            // With one on its way, the end of that one starts the next.
            let sending = sending.filter(|sending| sending.count == 0);
            if let Some(next) = sending.and_then(AbortsOfWorker::start_next) {
                return Some(next);
            }
        }
        None
    }

    /// Whether one more may be sent to a silent worker.
    fn has_place(&self, now: Instant) -> bool {
        let workers = self.by_worker.values();
        let silent = workers.filter(|sending| sending.is_silent(now));
        let count: usize = silent.map(|sending| sending.count).sum();
        count < self.max_at_once
    }
}

impl<T> AbortsOfWorker<T> {
    fn start_next(&mut self) -> Option<T> {
        let next = self.waiting.pop_front();
        self.count += usize::from(next.is_some());
        next
    }

    fn is_silent(&self, now: Instant) -> bool {
        self.silent_until.is_some_and(|until| now < until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe;

    const A: WorkerId = WorkerId(0);
    const B: WorkerId = WorkerId(1);
    const C: WorkerId = WorkerId(2);
    const D: WorkerId = WorkerId(3);

    /// These workers have not answered in time, and have so many places.
    fn silent(now: Instant, silent: &[WorkerId], max_at_once: usize) -> SilentWorkers<u32> {
        let mut workers = SilentWorkers::new(max_at_once);
        for worker in silent {
            assert_eq!(workers.admit(now, *worker, 0), AbortTurn::Now(0));
            assert_eq!(workers.on_ended(now, *worker, false), None);
        }
        workers
    }

    #[test]
    fn what_answers_in_time_waits_for_nothing() {
        let (mut workers, now) = (SilentWorkers::new(8), observe::now());
        for abort in 0..100 {
            assert_eq!(workers.admit(now, A, abort), AbortTurn::Now(abort));
        }
        for _ in 0..100 {
            assert_eq!(workers.on_ended(now, A, true), None);
        }
        assert!(workers.by_worker.is_empty());
    }

    #[test]
    fn a_silent_worker_has_one_place_and_the_others_theirs() {
        let (mut workers, now) = (SilentWorkers::new(8), observe::now());
        assert_eq!(workers.admit(now, A, 0), AbortTurn::Now(0));
        assert_eq!(workers.admit(now, A, 1), AbortTurn::Now(1));
        assert_eq!(workers.on_ended(now, A, false), None);
        // The second one is on its way still.
        assert_eq!(workers.admit(now, A, 2), AbortTurn::Waits);
        assert_eq!(workers.admit(now, A, 3), AbortTurn::Waits);
        assert_eq!(workers.admit(now, B, 4), AbortTurn::Now(4));
        assert_eq!(workers.on_ended(now, A, false), Some(2));
        assert_eq!(workers.admit(now, A, 5), AbortTurn::Waits);
        assert_eq!(workers.on_ended(now, A, false), Some(3));
        assert_eq!(workers.on_ended(now, A, false), Some(5));
        assert_eq!(workers.on_ended(now, A, false), None);
        // Nothing is on its way.
        assert_eq!(workers.admit(now, A, 6), AbortTurn::Now(6));
    }

    #[test]
    fn a_worker_that_answers_in_time_again_is_not_silent() {
        let (mut workers, now) = (SilentWorkers::new(8), observe::now());
        assert_eq!(workers.admit(now, A, 0), AbortTurn::Now(0));
        assert_eq!(workers.on_ended(now, A, false), None);
        assert_eq!(workers.admit(now, A, 1), AbortTurn::Now(1));
        assert_eq!(workers.admit(now, A, 2), AbortTurn::Waits);
        assert_eq!(workers.on_ended(now, A, true), Some(2));
        assert_eq!(workers.admit(now, A, 3), AbortTurn::Now(3));
        for _ in 0..2 {
            assert_eq!(workers.on_ended(now, A, true), None);
        }
        assert!(workers.by_worker.is_empty());
    }

    #[test]
    fn only_so_many_wait_for_a_silent_worker() {
        let (mut workers, now) = (SilentWorkers::new(8), observe::now());
        for abort in 0..2 {
            assert_eq!(workers.admit(now, A, abort), AbortTurn::Now(abort));
        }
        assert_eq!(workers.on_ended(now, A, false), None);
        for abort in 0..MAX_WAITING {
            assert_eq!(workers.admit(now, A, abort), AbortTurn::Waits);
        }
        assert_eq!(workers.admit(now, A, 9), AbortTurn::Dropped);
    }

    #[test]
    fn silent_workers_share_their_places_in_turn_and_leave_the_others_theirs() {
        let now = observe::now();
        let mut workers = silent(now, &[A, B, C], 2);
        assert_eq!(workers.admit(now, A, 1), AbortTurn::Now(1));
        assert_eq!(workers.admit(now, B, 2), AbortTurn::Now(2));
        assert_eq!(workers.admit(now, C, 3), AbortTurn::Waits);
        assert_eq!(workers.admit(now, A, 4), AbortTurn::Waits);
        assert_eq!(workers.admit(now, D, 5), AbortTurn::Now(5));
        assert_eq!(workers.on_ended(now, D, true), None);
        assert_eq!(workers.on_ended(now, A, false), Some(3));
        assert_eq!(workers.on_ended(now, B, false), Some(4));
        assert_eq!(workers.on_ended(now, C, false), None);
        assert_eq!(workers.on_ended(now, A, false), None);
        assert_eq!(workers.admit(now, C, 6), AbortTurn::Now(6));
    }

    #[test]
    fn what_finds_no_place_goes_on_though_silence_is_forgotten() {
        let now = observe::now();
        let mut workers = silent(now, &[A, B], 1);
        assert_eq!(workers.admit(now, A, 1), AbortTurn::Now(1));
        assert_eq!(workers.admit(now, B, 2), AbortTurn::Waits);
        let later = now + SILENT_FOR;
        assert_eq!(workers.admit(later, D, 3), AbortTurn::Now(3));
        assert_eq!(workers.on_ended(later, D, true), Some(2));
        assert_eq!(workers.on_ended(later, B, true), None);
        assert_eq!(workers.on_ended(later, A, true), None);
        assert!(workers.by_worker.is_empty() && workers.without_place.is_empty());
    }

    #[test]
    fn silence_is_forgotten() {
        let (mut workers, now) = (SilentWorkers::new(8), observe::now());
        assert_eq!(workers.admit(now, A, 0), AbortTurn::Now(0));
        assert_eq!(workers.on_ended(now, A, false), None);
        let later = now + SILENT_FOR;
        assert_eq!(workers.admit(later, B, 1), AbortTurn::Now(1));
        assert_eq!(workers.on_ended(later, B, true), None);
        assert!(workers.by_worker.is_empty());
    }
}
