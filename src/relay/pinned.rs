//! What prefill workers keep for others: blocks that were handed over and not fetched yet. An engine keeps
//! them until they are, or until its lease on them ends; nothing that a router says ends it sooner. Pure.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::ids::WorkerId;

/// Handoffs remembered for one worker. Those of a lease's time: at more than a thousand a second that
/// nobody fetches, the oldest are forgotten first.
const HANDOFFS_MAX: usize = 65_536;

/// The handoffs of all workers that may still keep blocks from others.
#[derive(Debug, Default)]
pub(super) struct Pinned {
    workers: Mutex<FxHashMap<WorkerId, Kept>>,
}

#[derive(Debug, Default)]
struct Kept {
    next: u64,
    /// In the order in which they were granted, which is that in which they end.
    handoffs: VecDeque<Handoff>,
}

#[derive(Clone, Copy, Debug)]
struct Handoff {
    number: u64,
    tokens: u32,
    until: Instant,
}

/// One handoff that was granted and is still to be fetched. Dropped, its blocks stay where they are until
/// the lease ends.
#[must_use = "dropped, the blocks count as kept until the lease ends"]
#[derive(Debug)]
pub(super) struct Granted {
    pinned: Arc<Pinned>,
    worker: WorkerId,
    number: u64,
    /// The worker had too many, and its oldest is not counted any more.
    pub(super) has_displaced: bool,
}

impl Granted {
    /// The blocks were fetched, or the engine was told to let go of them.
    pub(super) fn release(self) {
        let mut workers = self.pinned.workers.lock();
        let Some(kept) = workers.get_mut(&self.worker) else {
            return;
        };
        let place = kept
            .handoffs
            .binary_search_by_key(&self.number, |it| it.number);
        if let Ok(place) = place {
            kept.handoffs.remove(place);
        }
    }
}

impl Pinned {
    /// Counts the blocks of a prompt as kept by the worker that has computed it.
    pub(super) fn grant(
        self: &Arc<Self>,
        now: Instant,
        lease: Duration,
        worker: WorkerId,
        tokens: u32,
    ) -> Granted {
        let mut workers = self.workers.lock();
        let kept = workers.entry(worker).or_default();
        kept.expire(now);
        let has_displaced = kept.handoffs.len() >= HANDOFFS_MAX;
        if has_displaced {
            kept.handoffs.pop_front();
        }
        let number = kept.next;
        kept.next += 1;
        kept.handoffs.push_back(Handoff {
            number,
            tokens,
            until: now + lease,
        });
        Granted {
            pinned: self.clone(),
            worker,
            number,
            has_displaced,
        }
    }

    /// Forgets what a worker kept whose process is another one now.
    pub(super) fn forget(&self, worker: WorkerId) {
        if let Some(kept) = self.workers.lock().get_mut(&worker) {
            // Numbers go on, for those of the former process may still be released.
            kept.handoffs.clear();
        }
    }

    /// How many handoffs a worker keeps blocks for, and of how many tokens.
    pub(super) fn of(&self, now: Instant, worker: WorkerId) -> (usize, u64) {
        let mut workers = self.workers.lock();
        let Some(kept) = workers.get_mut(&worker) else {
            return (0, 0);
        };
        kept.expire(now);
        let tokens = kept.handoffs.iter().map(|it| u64::from(it.tokens)).sum();
        (kept.handoffs.len(), tokens)
    }

    /// Forgets workers that left.
    pub(super) fn retain(&self, is_there: impl Fn(WorkerId) -> bool) {
        self.workers.lock().retain(|worker, _| is_there(*worker));
    }
}

impl Kept {
    fn expire(&mut self, now: Instant) {
        while self.handoffs.front().is_some_and(|it| it.until <= now) {
            self.handoffs.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::observe;

    const LEASE: Duration = Duration::from_secs(30);

    #[test]
    fn what_nobody_fetches_is_kept_until_the_lease_ends_and_what_was_fetched_is_not() {
        let (pinned, now) = (Arc::new(Pinned::default()), observe::now());
        let [first, second] = [WorkerId(0), WorkerId(1)];
        let fetched = pinned.grant(now, LEASE, first, 100);
        drop(pinned.grant(now, LEASE, first, 40));
        assert_eq!(pinned.of(now, first), (2, 140));
        fetched.release();
        assert_eq!(pinned.of(now, first), (1, 40));
        assert_eq!(pinned.of(now, second), (0, 0));
        assert_eq!(
            pinned.of(now + LEASE - Duration::from_nanos(1), first),
            (1, 40)
        );
        assert_eq!(pinned.of(now + LEASE, first), (0, 0));
    }

    #[test]
    fn what_is_fetched_after_its_lease_or_at_a_worker_that_left_changes_nothing() {
        let (pinned, now) = (Arc::new(Pinned::default()), observe::now());
        let late = pinned.grant(now, LEASE, WorkerId(0), 1);
        let other = pinned.grant(now + LEASE, LEASE, WorkerId(0), 2);
        late.release();
        assert_eq!(pinned.of(now + LEASE, WorkerId(0)), (1, 2));
        pinned.retain(|_| false);
        other.release();
        assert_eq!(pinned.of(now + LEASE, WorkerId(0)), (0, 0));
    }

    #[test]
    fn another_process_keeps_nothing_for_the_former_and_is_not_mistaken_for_it() {
        let (pinned, now) = (Arc::new(Pinned::default()), observe::now());
        let former = pinned.grant(now, LEASE, WorkerId(0), 1);
        pinned.forget(WorkerId(0));
        assert_eq!(pinned.of(now, WorkerId(0)), (0, 0));
        let other = pinned.grant(now, LEASE, WorkerId(0), 2);
        former.release();
        assert_eq!(pinned.of(now, WorkerId(0)), (1, 2));
        other.release();
        assert_eq!(pinned.of(now, WorkerId(0)), (0, 0));
    }

    #[test]
    fn of_too_many_the_oldest_is_forgotten_and_that_is_told() {
        let (pinned, now) = (Arc::new(Pinned::default()), observe::now());
        for _ in 0..HANDOFFS_MAX {
            assert!(!pinned.grant(now, LEASE, WorkerId(0), 1).has_displaced);
        }
        assert!(pinned.grant(now, LEASE, WorkerId(0), 1).has_displaced);
        assert_eq!(pinned.of(now, WorkerId(0)).0, HANDOFFS_MAX);
    }

    proptest! {
        /// Against a map of number -> end.
        #[test]
        fn it_counts_what_was_granted_and_neither_fetched_nor_over(
            steps in proptest::collection::vec((0u8..3, 0u64..20, 1u32..100), 0..60),
        ) {
            let (pinned, mut now) = (Arc::new(Pinned::default()), observe::now());
            let mut held = Vec::new();
            let mut model: BTreeMap<usize, (Instant, u32)> = BTreeMap::new();
            let mut number = 0;
            for (step, seconds, tokens) in steps {
                match step {
                    0 => {
                        held.push((number, pinned.grant(now, LEASE, WorkerId(7), tokens)));
                        model.insert(number, (now + LEASE, tokens));
                        number += 1;
                    }
                    1 if !held.is_empty() => {
                        let (number, granted) = held.swap_remove(seconds as usize % held.len());
                        granted.release();
                        model.remove(&number);
                    }
                    1 => {}
                    _ => now += Duration::from_secs(seconds),
                }
                let live = || model.values().filter(|(until, _)| *until > now);
                let expected = (live().count(), live().map(|(_, tokens)| u64::from(*tokens)).sum());
                prop_assert_eq!(pinned.of(now, WorkerId(7)), expected);
            }
        }
    }
}
