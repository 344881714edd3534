//! How many handshakes run at a time. At the limit new ones wait, and one that has taken long makes room for them: a
//! client that stalls costs itself, and not the others.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use crate::observe;

#[derive(Debug, Default)]
pub(super) struct Handshakes {
    running: Mutex<Running>,
    ended: Notify,
}

/// The running handshakes in the order of their start. Pure.
#[derive(Debug)]
struct Running<T = oneshot::Sender<()>> {
    next: u64,
    by_start: BTreeMap<u64, (Instant, T)>,
}

impl<T> Default for Running<T> {
    fn default() -> Self {
        Self {
            next: 0,
            by_start: BTreeMap::new(),
        }
    }
}

/// Whether a handshake may start.
#[derive(Debug, PartialEq, Eq)]
enum Start<T> {
    /// Under this number. The other one must end for it.
    Now(u64, Option<T>),
    /// The oldest one may be ended after this time.
    Wait(Duration),
}

impl<T> Running<T> {
    fn start(&mut self, now: Instant, max: usize, patience: Duration, running: T) -> Start<T> {
        let mut ended = None;
        if self.by_start.len() >= max.max(1)
            && let Some(oldest) = self.by_start.first_entry()
        {
            let took = now.saturating_duration_since(oldest.get().0);
            if took < patience {
                return Start::Wait(patience - took);
            }
            ended = Some(oldest.remove().1);
        }
        let number = self.next;
        self.next += 1;
        self.by_start.insert(number, (now, running));
        Start::Now(number, ended)
    }
}

/// One handshake for as long as this lives.
#[derive(Debug)]
pub(super) struct Handshake<'h> {
    all: &'h Handshakes,
    number: u64,
    ended: oneshot::Receiver<()>,
}

impl Handshakes {
    /// Waits until a handshake may start: while `max` run, until one ends or has taken `patience`.
    pub(super) async fn start(&self, max: usize, patience: Duration) -> Handshake<'_> {
        loop {
            let one_ended = self.ended.notified();
            let (sender, ended) = oneshot::channel();
            let now = observe::now();
            let start = self.running.lock().start(now, max, patience, sender);
            match start {
                // Dropping the other one's sender ends it.
                Start::Now(number, _) => {
                    return Handshake {
                        all: self,
                        number,
                        ended,
                    };
                }
                Start::Wait(left) => tokio::select! {
                    () = one_ended => {}
                    () = tokio::time::sleep(left) => {}
                },
            }
        }
    }

    #[cfg(test)]
    fn count(&self) -> usize {
        self.running.lock().by_start.len()
    }
}

impl Handshake<'_> {
    /// Resolves when it must end, because others wait and it has taken long.
    pub(super) async fn must_end(&mut self) {
        let _ = (&mut self.ended).await;
    }
}

impl Drop for Handshake<'_> {
    fn drop(&mut self) {
        self.all.running.lock().by_start.remove(&self.number);
        self.all.ended.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(1);

    #[test]
    fn at_the_limit_the_oldest_makes_room_once_it_has_taken_long() {
        let began = observe::now();
        let at = |ms| began + Duration::from_millis(ms);
        let mut running = Running::default();
        assert_eq!(running.start(at(0), 2, PATIENCE, 'a'), Start::Now(0, None));
        assert_eq!(
            running.start(at(500), 2, PATIENCE, 'b'),
            Start::Now(1, None)
        );
        let wait = Start::Wait(Duration::from_millis(100));
        assert_eq!(running.start(at(900), 2, PATIENCE, 'c'), wait);
        assert_eq!(
            running.start(at(1_000), 2, PATIENCE, 'c'),
            Start::Now(2, Some('a'))
        );
        let wait = Start::Wait(Duration::from_millis(500));
        assert_eq!(running.start(at(1_000), 2, PATIENCE, 'd'), wait);
    }

    #[tokio::test]
    async fn one_that_ended_makes_room_at_once() {
        let handshakes = Handshakes::default();
        let first = handshakes.start(1, Duration::from_secs(3_600)).await;
        let second = handshakes.start(1, Duration::from_secs(3_600));
        let (_second, ()) = tokio::join!(second, async { drop(first) });
        assert_eq!(handshakes.count(), 1);
    }

    #[tokio::test]
    async fn one_that_stalls_is_ended_for_one_that_waits() {
        let handshakes = Handshakes::default();
        let mut stalled = handshakes.start(1, Duration::from_millis(5)).await;
        let _next = handshakes.start(1, Duration::from_millis(5)).await;
        stalled.must_end().await;
        drop(stalled);
        assert_eq!(handshakes.count(), 1);
    }

    proptest! {
        #[test]
        fn never_more_than_the_limit_run_and_only_old_ones_are_ended(
            steps in proptest::collection::vec((0u64..400, any::<bool>()), 1..60),
            max in 1usize..5,
        ) {
            let began = observe::now();
            let mut now = 0;
            let mut running = Running::default();
            for (ms, ends) in steps {
                now += ms;
                if ends {
                    running.by_start.pop_first();
                }
                let started = running.start(began + Duration::from_millis(now), max, PATIENCE, now);
                if let Start::Now(_, Some(ended)) = started {
                    prop_assert!(now - ended >= 1_000);
                }
                prop_assert!(running.by_start.len() <= max);
            }
        }
    }
}
