//! The memory budget of all clients' request bodies together. Bodies of up to 64 KiB are not counted and never wait.
//!
//! When the budget is used up, a new large body waits for its turn, for a bounded time, before any of it is read. Bodies
//! that are being read already go on, and wait for those that end; if all of them wait for each other, the newest is refused.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use parking_lot::Mutex;
use prometheus::IntCounter;

use crate::observe::metrics::Registry;
use crate::openai::error::ApiError;

/// Bodies up to this size are always read: most prompts are shorter, and as many of them as there are connections
/// need less than the budget.
const SMALL_BYTES: u64 = 64 << 10;
/// The budget is used in steps of this size.
const STEP_BYTES: u64 = 256 << 10;

/// The memory that bodies take, from the first byte until an engine has started to answer.
#[derive(Debug)]
pub(super) struct BodyBudget {
    queue: Arc<Mutex<Queue>>,
    max: u64,
    max_wait: Duration,
    waited: IntCounter,
    refused: IntCounter,
}

/// Who has what, and who waits. Bodies have numbers in the order in which they came.
#[derive(Debug, Default)]
struct Queue {
    max: u64,
    used: u64,
    next: u64,
    /// Bodies that have a part of the budget.
    holders: usize,
    /// Bodies that are being read and need more.
    growing: BTreeMap<u64, Growing>,
    /// Bodies of which nothing is read yet.
    new: BTreeMap<u64, Waker>,
}

#[derive(Debug)]
struct Growing {
    is_holder: bool,
    /// None if it is refused.
    waker: Option<Waker>,
}

impl Queue {
    fn has_room(&self, bytes: u64) -> bool {
        self.used.saturating_add(bytes) <= self.max
    }

    /// Whether a new body may be read: in the order of their arrival, and behind those that are being read.
    fn poll_start(&mut self, number: u64, bytes: u64, cx: &mut Context<'_>) -> Poll<()> {
        let is_first = self.new.range(..number).next().is_none();
        if is_first && self.growing.is_empty() && self.has_room(bytes) {
            self.leave(number);
            return Poll::Ready(());
        }
        self.new.insert(number, cx.waker().clone());
        Poll::Pending
    }

    /// Gives a body `bytes` more. False if it is refused.
    fn poll_grow(
        &mut self,
        number: u64,
        bytes: u64,
        is_holder: bool,
        cx: &mut Context<'_>,
    ) -> Poll<bool> {
        let waiting = self.growing.get(&number);
        let is_refused = waiting.is_some_and(|waiting| waiting.waker.is_none());
        let is_first = self.growing.range(..number).next().is_none();
        if is_refused || (is_first && self.has_room(bytes)) {
            if !is_refused {
                self.used += bytes;
                self.holders += usize::from(!is_holder);
            }
            self.leave(number);
            return Poll::Ready(!is_refused);
        }
        let waker = Some(cx.waker().clone());
        self.growing.insert(number, Growing { is_holder, waker });
        let waiting = self.growing.values();
        if waiting.filter(|waiting| waiting.is_holder).count() < self.holders {
            // The others go on, and give their memory back when they end.
            return Poll::Pending;
        }
        // All that hold memory wait for more. The newest gives its part back.
        let mut holders = self.growing.iter_mut().rev();
        let newest = holders.find(|(_, waiting)| waiting.is_holder);
        match newest {
            Some((&newest, _)) if newest == number => {
                self.leave(number);
                Poll::Ready(false)
            }
            Some((_, waiting)) => {
                if let Some(waker) = waiting.waker.take() {
                    waker.wake();
                }
                Poll::Pending
            }
            None => Poll::Pending,
        }
    }

    /// The body does not wait any more: it has what it needs, or gave up. The next one may look again.
    fn leave(&mut self, number: u64) {
        self.growing.remove(&number);
        self.new.remove(&number);
        self.wake_next();
    }

    fn give_back(&mut self, bytes: u64) {
        self.used -= bytes;
        self.holders -= usize::from(bytes > 0);
        self.wake_next();
    }

    fn wake_next(&self) {
        let growing = self.growing.values().next();
        let growing = growing.map(|waiting| waiting.waker.as_ref());
        let next = growing.unwrap_or_else(|| self.new.values().next());
        if let Some(waker) = next {
            waker.wake_by_ref();
        }
    }
}

impl BodyBudget {
    pub(super) fn new(max: u64, max_wait: Duration, registry: &Registry) -> Self {
        let queue = Arc::new(Mutex::new(Queue {
            max,
            ..Queue::default()
        }));
        let bytes = registry.gauge(
            "warmroute_request_body_bytes",
            "Memory of request bodies larger than 64 KiB that no engine has started to answer.",
        );
        let waiting = registry.gauge(
            "warmroute_request_bodies_waiting",
            "Requests whose body waits for memory.",
        );
        let read = queue.clone();
        registry.on_scrape(move || {
            let queue = read.lock();
            bytes.set(queue.used as i64);
            waiting.set((queue.new.len() + queue.growing.len()) as i64);
        });
        Self {
            queue,
            max,
            max_wait,
            waited: registry.counter(
                "warmroute_request_bodies_waited_total",
                "Requests whose body had to wait because the bodies of all clients together had used up their memory \
                 budget.",
            ),
            refused: registry.counter(
                "warmroute_request_bodies_refused_total",
                "Requests refused because the bodies of all clients together had used up their memory budget.",
            ),
        }
    }

    /// With other bounds, and with the bodies of this one.
    pub(super) fn successor(&self, max: u64, max_wait: Duration) -> Self {
        {
            let mut queue = self.queue.lock();
            queue.max = max;
            queue.wake_next();
        }
        Self {
            queue: self.queue.clone(),
            max,
            max_wait,
            waited: self.waited.clone(),
            refused: self.refused.clone(),
        }
    }

    /// Waits until a body that announces this size may be read. Nothing is reserved for bytes that may never come.
    pub(super) async fn start(&self, announced: u64) -> Result<Reservation<'_>, ApiError> {
        let mut reservation = Reservation {
            budget: self,
            number: 0,
            bytes: 0,
            has_waited: false,
        };
        if announced > SMALL_BYTES {
            reservation.number = self.number();
            let number = reservation.number;
            let ask = |queue: &mut Queue, cx: &mut Context<'_>| {
                queue.poll_start(number, announced, cx).map(|()| true)
            };
            let has_waited = &mut reservation.has_waited;
            self.wait(number, announced, has_waited, ask).await?;
        }
        Ok(reservation)
    }

    fn number(&self) -> u64 {
        let mut queue = self.queue.lock();
        queue.next += 1;
        queue.next
    }

    /// Asks until the answer comes, for `max_wait` at most.
    async fn wait(
        &self,
        number: u64,
        bytes: u64,
        has_waited: &mut bool,
        mut ask: impl FnMut(&mut Queue, &mut Context<'_>) -> Poll<bool>,
    ) -> Result<(), ApiError> {
        let never_fits = bytes > self.max;
        // Mostly there is room, and no timer is needed.
        let first = match never_fits {
            true => Poll::Ready(false),
            false => poll_fn(|cx| Poll::Ready(ask(&mut self.queue.lock(), cx))).await,
        };
        let is_granted = match first {
            Poll::Ready(is_granted) => is_granted,
            Poll::Pending => {
                let _waiting = Waiting {
                    queue: &self.queue,
                    number,
                };
                if !std::mem::replace(has_waited, true) {
                    self.waited.inc();
                }
                let asked = poll_fn(|cx| ask(&mut self.queue.lock(), cx));
                let answered = tokio::time::timeout(self.max_wait, asked).await;
                answered.unwrap_or(false)
            }
        };
        match is_granted {
            true => Ok(()),
            false => {
                self.refused.inc();
                Err(ApiError::bodies_full())
            }
        }
    }
}

/// Leaves the queue when the wait ends, however it does.
struct Waiting<'a> {
    queue: &'a Mutex<Queue>,
    number: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.queue.lock().leave(self.number);
    }
}

/// One body's part of the budget, given back when dropped.
#[derive(Debug)]
pub(super) struct Reservation<'a> {
    budget: &'a BodyBudget,
    /// 0 until the body has asked for memory.
    number: u64,
    bytes: u64,
    /// It counts once, however often it waits for more.
    has_waited: bool,
}

impl Reservation<'_> {
    /// Makes it large enough for a body of this size.
    pub(super) async fn grow(&mut self, bytes: u64) -> Result<(), ApiError> {
        if bytes <= SMALL_BYTES || bytes <= self.bytes {
            return Ok(());
        }
        if self.number == 0 {
            self.number = self.budget.number();
        }
        let (number, total) = (self.number, bytes.next_multiple_of(STEP_BYTES));
        let (more, is_holder) = (total - self.bytes, self.bytes > 0);
        let ask =
            |queue: &mut Queue, cx: &mut Context<'_>| queue.poll_grow(number, more, is_holder, cx);
        self.budget
            .wait(number, total, &mut self.has_waited, ask)
            .await?;
        self.bytes = total;
        Ok(())
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.budget.queue.lock().give_back(self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn budget(max: u64, max_wait: Duration) -> BodyBudget {
        BodyBudget::new(max, max_wait, &Registry::default())
    }

    fn used(budget: &BodyBudget) -> u64 {
        budget.queue.lock().used
    }

    #[tokio::test]
    async fn small_bodies_always_fit_and_a_large_one_waits_for_its_turn() {
        let budget = budget(MIB, Duration::from_secs(60));
        let mut large = budget.start(700 << 10).await.unwrap();
        large.grow(700 << 10).await.unwrap();
        assert_eq!(used(&budget), 768 << 10);
        let mut small = budget.start(SMALL_BYTES).await.unwrap();
        small.grow(SMALL_BYTES).await.unwrap();
        let other = async {
            let mut other = budget.start(500 << 10).await.unwrap();
            other.grow(500 << 10).await.unwrap();
            other
        };
        let end_first = async {
            while budget.waited.get() == 0 {
                tokio::task::yield_now().await;
            }
            assert_eq!(used(&budget), 768 << 10);
            drop(large);
        };
        let (other, ()) = tokio::join!(other, end_first);
        assert_eq!(used(&budget), 512 << 10);
        drop(other);
        assert_eq!(used(&budget), 0);
        assert_eq!((budget.waited.get(), budget.refused.get()), (1, 0));
    }

    #[tokio::test]
    async fn a_wait_is_bounded_and_what_never_fits_does_not_wait() {
        let budget = budget(MIB, Duration::from_millis(20));
        let mut large = budget.start(MIB).await.unwrap();
        large.grow(MIB).await.unwrap();
        assert!(budget.start(MIB).await.is_err());
        assert!(budget.start(2 * MIB).await.is_err());
        assert_eq!((budget.waited.get(), budget.refused.get()), (1, 2));
        drop(large);
        assert!(budget.start(MIB).await.is_ok());
    }

    #[test]
    fn of_bodies_that_wait_for_each_other_the_newest_is_refused() {
        let mut queue = Queue {
            max: MIB,
            ..Queue::default()
        };
        let cx = &mut Context::from_waker(Waker::noop());
        assert_eq!(queue.poll_grow(1, MIB / 2, false, cx), Poll::Ready(true));
        assert_eq!(queue.poll_grow(2, MIB / 2, false, cx), Poll::Ready(true));
        assert_eq!(queue.poll_grow(2, MIB / 2, true, cx), Poll::Pending);
        assert_eq!(queue.poll_grow(1, MIB / 2, true, cx), Poll::Pending);
        assert_eq!(queue.poll_grow(2, MIB / 2, true, cx), Poll::Ready(false));
        queue.give_back(MIB / 2);
        assert_eq!(queue.poll_grow(1, MIB / 2, true, cx), Poll::Ready(true));
        assert_eq!(queue.used, MIB);
    }

    /// A body that comes in steps.
    struct Upload {
        number: u64,
        steps: u64,
        started: bool,
        has: u64,
        ended: bool,
    }

    proptest! {
        /// Whatever the order in which bodies are polled: never more than the budget, and all of them end without a
        /// time-out.
        #[test]
        fn bodies_together_never_exceed_the_budget_or_wait_for_ever(
            steps in proptest::collection::vec(1_u64..12, 1..20),
            mut order in proptest::collection::vec(any::<prop::sample::Index>(), 0..200),
        ) {
            let mut queue = Queue { max: 12, ..Queue::default() };
            let cx = &mut Context::from_waker(Waker::noop());
            let mut uploads: Vec<Upload> = (1..).zip(&steps).map(|(number, &steps)| {
                Upload { number, steps, started: false, has: 0, ended: false }
            }).collect();
            loop {
                let random = order.pop().map(|index| index.index(uploads.len()));
                let turns = random.map_or(0..uploads.len(), |index| index..index + 1);
                let mut moved = false;
                for upload in &mut uploads[turns] {
                    if upload.ended {
                        continue;
                    }
                    if !upload.started {
                        upload.started = queue.poll_start(upload.number, upload.steps, cx).is_ready();
                        moved |= upload.started;
                    } else if upload.has < upload.steps {
                        match queue.poll_grow(upload.number, 1, upload.has > 0, cx) {
                            Poll::Ready(true) => { upload.has += 1; moved = true; }
                            Poll::Ready(false) => { upload.ended = true; moved = true; }
                            Poll::Pending => {}
                        }
                    } else {
                        upload.ended = true;
                        moved = true;
                    }
                    if upload.ended {
                        queue.give_back(std::mem::take(&mut upload.has));
                    }
                }
                let sum: u64 = uploads.iter().map(|upload| upload.has).sum();
                prop_assert!(queue.used == sum && sum <= 12);
                if uploads.iter().all(|upload| upload.ended) {
                    break;
                }
                prop_assert!(moved || random.is_some(), "all wait for each other");
            }
            prop_assert!(queue.new.is_empty() && queue.growing.is_empty());
        }
    }
}
