//! Virtual time: what is to happen, in order. A run of it takes no longer than its computing, and is
//! the same every time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// A clock that stands still until the next event, and the events to come. What was set for the same
/// moment happens in the order in which it was set.
#[derive(Debug)]
pub(super) struct World<E> {
    now: Duration,
    set: u64,
    coming: BinaryHeap<Reverse<Set<E>>>,
}

#[derive(Debug)]
struct Set<E> {
    at: Duration,
    number: u64,
    event: E,
}

impl<E> World<E> {
    pub(super) fn new() -> Self {
        Self {
            now: Duration::ZERO,
            set: 0,
            coming: BinaryHeap::new(),
        }
    }

    /// Since the world began.
    pub(super) fn now(&self) -> Duration {
        self.now
    }

    /// The past is over: what is set for it happens now.
    pub(super) fn set(&mut self, at: Duration, event: E) {
        let (at, number) = (at.max(self.now), self.set);
        self.set += 1;
        self.coming.push(Reverse(Set { at, number, event }));
    }

    /// Moves the clock on to the next event.
    pub(super) fn next(&mut self) -> Option<E> {
        let Reverse(next) = self.coming.pop()?;
        self.now = next.at;
        Some(next.event)
    }
}

impl<E> Set<E> {
    fn key(&self) -> (Duration, u64) {
        (self.at, self.number)
    }
}

impl<E> Ord for Set<E> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

impl<E> PartialOrd for Set<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for Set<E> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl<E> Eq for Set<E> {}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn events_come_in_the_order_of_their_times_and_then_of_their_setting(times in proptest::collection::vec(0u64..9, 0..40)) {
            let mut world = World::new();
            for (number, seconds) in times.iter().enumerate() {
                world.set(Duration::from_secs(*seconds), number);
            }
            let mut expected: Vec<(u64, usize)> = times.iter().copied().zip(0..).collect();
            expected.sort();
            for (seconds, number) in expected {
                prop_assert_eq!(world.next(), Some(number));
                prop_assert_eq!(world.now(), Duration::from_secs(seconds));
            }
            prop_assert_eq!(world.next(), None);
        }
    }

    #[test]
    fn what_is_set_for_the_past_happens_now() {
        let mut world = World::new();
        world.set(Duration::from_secs(5), "late");
        world.next();
        world.set(Duration::from_secs(1), "too late");
        assert_eq!(world.next(), Some("too late"));
        assert_eq!(world.now(), Duration::from_secs(5));
    }
}
