//! KV blocks that prefill workers keep pinned for decode workers that have not fetched them yet. An engine keeps them
//! until they are fetched or its lease ends; the router cannot end the lease. For `/fleet` and metrics. Pure.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::ids::WorkerId;

/// KV transfers remembered for one worker: enough for a thousand a second that are never fetched. Beyond, the oldest are
/// forgotten.
const TRANSFERS_MAX: usize = 65_536;

#[derive(Debug, Default)]
pub(in crate::relay) struct PinnedBlocks {
    workers: Mutex<FxHashMap<WorkerId, WorkerPins>>,
}

#[derive(Debug, Default)]
struct WorkerPins {
    next: u64,
    /// In order of time, which is also the order in which their leases end.
    pins: VecDeque<Pin>,
}

#[derive(Clone, Copy, Debug)]
struct Pin {
    number: u64,
    tokens: u32,
    until: Instant,
}

/// The pinned blocks of one KV transfer. Dropped, they count as pinned until the lease ends.
#[must_use = "dropped, the blocks count as pinned until the lease ends"]
#[derive(Debug)]
pub(in crate::relay) struct PinnedTransfer {
    pinned: Arc<PinnedBlocks>,
    worker: WorkerId,
    number: u64,
    /// The worker has too many, and its oldest one is forgotten.
    pub(in crate::relay) has_displaced: bool,
}

impl PinnedTransfer {
    /// The blocks were fetched, or the engine got the order to free them.
    pub(in crate::relay) fn release(self) {
        let mut workers = self.pinned.workers.lock();
        let Some(pins_of) = workers.get_mut(&self.worker) else {
            return;
        };
        let found = pins_of
            .pins
            .binary_search_by_key(&self.number, |pin| pin.number);
        if let Ok(index) = found {
            pins_of.pins.remove(index);
        }
    }
}

impl PinnedBlocks {
    /// Counts a prompt's blocks as pinned by the worker that has computed it.
    pub(in crate::relay) fn pin(
        self: &Arc<Self>,
        now: Instant,
        lease: Duration,
        worker: WorkerId,
        tokens: u32,
    ) -> PinnedTransfer {
        let mut workers = self.workers.lock();
        let pins_of = workers.entry(worker).or_default();
        pins_of.expire(now);
        let has_displaced = pins_of.pins.len() >= TRANSFERS_MAX;
        if has_displaced {
            pins_of.pins.pop_front();
        }
        let number = pins_of.next;
        pins_of.next += 1;
        pins_of.pins.push_back(Pin {
            number,
            tokens,
            until: now + lease,
        });
        PinnedTransfer {
            pinned: self.clone(),
            worker,
            number,
            has_displaced,
        }
    }

    /// Forgets the pinned blocks of a worker whose engine process is a new one.
    pub(in crate::relay) fn forget(&self, worker: WorkerId) {
        if let Some(pins_of) = self.workers.lock().get_mut(&worker) {
            // Numbers go on: transfers of the former process may still be released.
            pins_of.pins.clear();
        }
    }

    /// The number of a worker's pinned transfers, and their tokens.
    pub(in crate::relay) fn of(&self, now: Instant, worker: WorkerId) -> (usize, u64) {
        let mut workers = self.workers.lock();
        let Some(pins_of) = workers.get_mut(&worker) else {
            return (0, 0);
        };
        pins_of.expire(now);
        let tokens = pins_of.pins.iter().map(|pin| u64::from(pin.tokens)).sum();
        (pins_of.pins.len(), tokens)
    }

    /// Forgets workers that left the fleet.
    pub(in crate::relay) fn retain(&self, is_there: impl Fn(WorkerId) -> bool) {
        self.workers.lock().retain(|worker, _| is_there(*worker));
    }
}

impl WorkerPins {
    fn expire(&mut self, now: Instant) {
        while self.pins.front().is_some_and(|pin| pin.until <= now) {
            self.pins.pop_front();
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
    fn blocks_are_pinned_until_they_are_fetched_or_the_lease_ends() {
        let (pinned, now) = (Arc::new(PinnedBlocks::default()), observe::now());
        let [first, second] = [WorkerId(0), WorkerId(1)];
        let fetched = pinned.pin(now, LEASE, first, 100);
        drop(pinned.pin(now, LEASE, first, 40));
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
    fn a_release_after_the_lease_or_after_the_worker_left_changes_nothing() {
        let (pinned, now) = (Arc::new(PinnedBlocks::default()), observe::now());
        let late = pinned.pin(now, LEASE, WorkerId(0), 1);
        let other = pinned.pin(now + LEASE, LEASE, WorkerId(0), 2);
        late.release();
        assert_eq!(pinned.of(now + LEASE, WorkerId(0)), (1, 2));
        pinned.retain(|_| false);
        other.release();
        assert_eq!(pinned.of(now + LEASE, WorkerId(0)), (0, 0));
    }

    #[test]
    fn a_restarted_worker_has_no_pinned_blocks_and_late_releases_do_not_touch_its_new_ones() {
        let (pinned, now) = (Arc::new(PinnedBlocks::default()), observe::now());
        let former = pinned.pin(now, LEASE, WorkerId(0), 1);
        pinned.forget(WorkerId(0));
        assert_eq!(pinned.of(now, WorkerId(0)), (0, 0));
        let other = pinned.pin(now, LEASE, WorkerId(0), 2);
        former.release();
        assert_eq!(pinned.of(now, WorkerId(0)), (1, 2));
        other.release();
        assert_eq!(pinned.of(now, WorkerId(0)), (0, 0));
    }

    #[test]
    fn beyond_the_bound_the_oldest_transfer_is_forgotten_and_the_caller_learns_it() {
        let (pinned, now) = (Arc::new(PinnedBlocks::default()), observe::now());
        for _ in 0..TRANSFERS_MAX {
            assert!(!pinned.pin(now, LEASE, WorkerId(0), 1).has_displaced);
        }
        assert!(pinned.pin(now, LEASE, WorkerId(0), 1).has_displaced);
        assert_eq!(pinned.of(now, WorkerId(0)).0, TRANSFERS_MAX);
    }

    proptest! {
        /// Against a map of number -> end.
        #[test]
        fn it_counts_what_is_neither_fetched_nor_expired(
            steps in proptest::collection::vec((0u8..3, 0u64..20, 1u32..100), 0..60),
        ) {
            let (pinned, mut now) = (Arc::new(PinnedBlocks::default()), observe::now());
            let mut held = Vec::new();
            let mut model: BTreeMap<usize, (Instant, u32)> = BTreeMap::new();
            let mut number = 0;
            for (step, seconds, tokens) in steps {
                match step {
                    0 => {
                        held.push((number, pinned.pin(now, LEASE, WorkerId(7), tokens)));
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
