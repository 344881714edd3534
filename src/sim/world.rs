//! Virtual time: a queue of events ordered by time. A simulation on it is deterministic and never waits.

use std::collections::BTreeMap;
use std::time::Duration;

/// A clock and its scheduled events. The clock moves only when the next event is taken. Events of the same time are
/// taken in the order in which they were scheduled.
#[derive(Debug)]
pub struct World<E> {
    now: Duration,
    scheduled: u64,
    /// By time, and by the number of events that were scheduled before.
    queue: BTreeMap<(Duration, u64), E>,
}

impl<E> Default for World<E> {
    fn default() -> Self {
        Self {
            now: Duration::ZERO,
            scheduled: 0,
            queue: BTreeMap::new(),
        }
    }
}

impl<E> World<E> {
    /// Time since the start of the simulation.
    pub fn now(&self) -> Duration {
        self.now
    }

    /// Schedules an event; one for a past time happens now.
    pub fn set(&mut self, at: Duration, event: E) {
        self.queue.insert((at.max(self.now), self.scheduled), event);
        self.scheduled += 1;
    }

    /// Takes the next event and moves the clock to its time.
    pub fn next_event(&mut self) -> Option<E> {
        let ((at, _), event) = self.queue.pop_first()?;
        self.now = at;
        Some(event)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn events_are_taken_by_time_and_then_in_the_order_of_scheduling(times in proptest::collection::vec(0u64..9, 0..40)) {
            let mut world = World::default();
            for (number, seconds) in times.iter().enumerate() {
                world.set(Duration::from_secs(*seconds), number);
            }
            let mut expected: Vec<(u64, usize)> = times.iter().copied().zip(0..).collect();
            expected.sort();
            for (seconds, number) in expected {
                prop_assert_eq!(world.next_event(), Some(number));
                prop_assert_eq!(world.now(), Duration::from_secs(seconds));
            }
            prop_assert_eq!(world.next_event(), None);
        }
    }

    #[test]
    fn an_event_for_a_past_time_happens_now() {
        let mut world = World::default();
        world.set(Duration::from_secs(5), "late");
        world.next_event();
        world.set(Duration::from_secs(1), "too late");
        assert_eq!(world.next_event(), Some("too late"));
        assert_eq!(world.now(), Duration::from_secs(5));
    }
}
