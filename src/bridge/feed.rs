//! What one rank's follower and its subscribers share: the life that is told now, and who waits for
//! more of it.
//!
//! Subscribers have no queues. Each knows the number it needs next, and all read the same messages from
//! the history; whoever needs one that is no longer kept was too slow and is cut off.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tonic::Status;

use super::life::{Joining, Life, Limits, Listing, Start};
use super::metrics::Metrics;
use crate::kv::event::Batch;

#[derive(Debug)]
pub struct Feed {
    rank: u32,
    limits: Limits,
    metrics: Metrics,
    inner: Mutex<Inner>,
    /// A list was made.
    listed: Notify,
}

#[derive(Debug)]
struct Inner {
    life: Option<Life>,
    /// Why nobody is served; `None` while subscribers are.
    closed: Option<Status>,
    /// Rises whenever all calls are to end, with what they are to be told.
    term: u64,
    farewell: Status,
    /// Above this begin the numbers of the next life.
    number: u64,
    wakers: HashMap<u64, Waker>,
    subscribers: u64,
}

/// What a subscriber begins with.
#[derive(Debug)]
pub struct Joined {
    pub place: Place,
    pub epoch: String,
    /// The number of the last batch: with it the subscriber has what there is now.
    pub last: u64,
}

/// What becomes of one who wants to subscribe.
enum Entry {
    Joined(Joined),
    List(Listing),
    Wait,
}

/// One call's place in a feed.
#[derive(Debug)]
pub struct Place {
    id: u64,
    term: u64,
    parts: Arc<[Bytes]>,
    /// How many of them were given away.
    given: usize,
    next: u64,
}

impl Feed {
    pub fn new(rank: u32, limits: Limits, metrics: Metrics) -> Self {
        let status = Status::unavailable("the engine's events are not followed yet");
        metrics.serving.set(rank, false);
        Self {
            rank,
            limits,
            metrics,
            inner: Mutex::new(Inner {
                life: None,
                closed: Some(status.clone()),
                term: 0,
                farewell: status,
                number: 0,
                wakers: HashMap::new(),
                subscribers: 0,
            }),
            listed: Notify::new(),
        }
    }

    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// A new life, which begins with what is pushed next. `number`: microseconds since 1970, say;
    /// numbers begin there or above all that were given before.
    pub fn begin(&self, epoch: String, number: u64, unknown_before: u64) {
        let mut inner = self.inner.lock();
        self.end(&mut inner, "another life of the engine begins");
        inner.number = number.max(inner.number + 1);
        let life = Life::new(self.rank, epoch, inner.number, unknown_before, self.limits);
        inner.life = Some(life);
        self.metrics.lives.inc();
    }

    /// Whether anyone may be served.
    pub fn is_open(&self) -> bool {
        self.inner.lock().closed.is_none()
    }

    pub fn has_life(&self) -> bool {
        self.inner.lock().life.is_some()
    }

    /// Whether a life has begun of which no batch came yet, and which claims that there was none.
    pub fn is_blank(&self) -> bool {
        let inner = self.inner.lock();
        let life = inner.life.as_ref();
        life.is_some_and(|life| life.history().batches() == 0 && life.unknown_before() == 0)
    }

    /// What was told is no longer true, or cannot be continued.
    pub fn forget(&self, why: &str) {
        let mut inner = self.inner.lock();
        self.end(&mut inner, why);
    }

    fn end(&self, inner: &mut Inner, why: &str) {
        let Some(life) = inner.life.take() else {
            return;
        };
        // With an end that makes every subscriber start over. After any other, one that does not look
        // at epochs would ask to go on.
        inner.number = life.number();
        self.end_calls(inner, Status::data_loss(why));
        let status = Status::unavailable("the engine's events are not followed yet");
        inner.closed = Some(status);
        self.measure(inner);
    }

    /// The engine's next batch. An error ends the life: the batch has no message that says the same.
    pub fn push(&self, batch: Batch) -> Result<(), String> {
        let mut inner = self.inner.lock();
        let Some(life) = inner.life.as_mut() else {
            return Ok(());
        };
        let pushed = life.push(batch);
        if let Err(why) = pushed {
            let why = format!("the engine's events cannot be translated: {why}");
            inner.number = life.number();
            inner.life = None;
            self.end_calls(&mut inner, Status::failed_precondition(&why));
            self.measure(&inner);
            return Err(why);
        }
        self.metrics.batches.inc();
        self.measure(&inner);
        inner.wake();
        Ok(())
    }

    /// Serves what there is of the life. Gives whether that is new.
    pub fn open(&self) -> bool {
        let mut inner = self.inner.lock();
        let opens = inner.life.is_some() && inner.closed.is_some();
        if opens {
            inner.closed = None;
            self.metrics.serving.set(self.rank, true);
        }
        opens
    }

    /// Stops serving, and keeps the life: whether it goes on is not known. Gives whether that is new.
    pub fn close(&self, why: &str) -> bool {
        let mut inner = self.inner.lock();
        let closes = inner.closed.is_none();
        if closes {
            self.end_calls(&mut inner, Status::unavailable(why));
        }
        closes
    }

    /// Why nobody is served, if so.
    pub fn closed(&self) -> Option<Status> {
        self.inner.lock().closed.clone()
    }

    pub fn epoch(&self) -> Option<String> {
        let inner = self.inner.lock();
        inner.life.as_ref().map(|life| life.epoch().to_owned())
    }

    /// A place for a subscriber that has all up to batch `after`; 0: nothing. Waits while a list is made.
    pub async fn subscribe(self: &Arc<Self>, after: u64) -> Result<Joined, Status> {
        let mut has_waited = false;
        loop {
            let mut listed = std::pin::pin!(self.listed.notified());
            // Before the look at what there is: it might be made between the two.
            listed.as_mut().enable();
            match self.enter(after, has_waited)? {
                Entry::Joined(joined) => return Ok(joined),
                Entry::List(listing) => {
                    let feed = self.clone();
                    // Other calls on this thread go on, and it is done also when this one is given up.
                    let made = tokio::task::spawn_blocking(move || feed.list(listing)).await;
                    made.map_err(|error| Status::internal(error.to_string()))?;
                }
                Entry::Wait => listed.await,
            }
            has_waited = true;
        }
    }

    /// Makes a list without the lock, which takes a second or so for a million blocks.
    fn list(&self, listing: Listing) {
        let epoch = listing.epoch().to_owned();
        let made = std::panic::catch_unwind(AssertUnwindSafe(|| listing.make()));
        match made {
            Ok(listed) => {
                let mut inner = self.inner.lock();
                let life = inner.life.as_mut();
                if let Some(life) = life.filter(|life| life.epoch() == epoch) {
                    life.listed(listed);
                    self.measure(&inner);
                }
            }
            // What is held is gone with it.
            Err(_) => self.forget("the list of what is held could not be made"),
        }
        self.listed.notify_waiters();
    }

    fn enter(&self, after: u64, has_waited: bool) -> Result<Entry, Status> {
        let mut inner = self.inner.lock();
        if let Some(status) = &inner.closed {
            return Err(status.clone());
        }
        let life = inner.life.as_mut();
        let life = life.ok_or_else(|| Status::unavailable("no events are followed"))?;
        let joining = life.join(after, has_waited).map_err(|gone| {
            Status::out_of_range(format!(
                "batches after {after} are not held; those after {} are",
                gone.oldest
            ))
        });
        let Start { parts, next } = match joining? {
            Joining::Now(start) => start,
            Joining::List(listing) => return Ok(Entry::List(listing)),
            Joining::Wait => return Ok(Entry::Wait),
            Joining::Busy => {
                self.metrics.refused.inc();
                return Err(Status::unavailable(
                    "others still read as many lists as may be in memory",
                ));
            }
        };
        let (epoch, last) = (life.epoch().to_owned(), life.number());
        inner.subscribers += 1;
        let place = Place {
            id: inner.subscribers,
            term: inner.term,
            parts,
            given: 0,
            next,
        };
        Ok(Entry::Joined(Joined { place, epoch, last }))
    }

    /// The next message for a subscriber, or what its call ends with.
    pub fn poll_next(
        &self,
        place: &mut Place,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Bytes, Status>> {
        let mut inner = self.inner.lock();
        if place.term != inner.term {
            return Poll::Ready(Err(inner.farewell.clone()));
        }
        let Some(life) = &inner.life else {
            return Poll::Ready(Err(inner.farewell.clone()));
        };
        let is_kept = place.next >= life.history().first();
        if let Some(part) = place.parts.get(place.given).filter(|_| is_kept) {
            place.given += 1;
            return Poll::Ready(Ok(part.clone()));
        }
        // They may be the last to keep the snapshot alive.
        place.parts = Arc::default();
        place.given = 0;
        if let Some(message) = life.history().get(place.next) {
            place.next += 1;
            return Poll::Ready(Ok(message.clone()));
        }
        if !is_kept {
            self.metrics.slow.inc();
            return Poll::Ready(Err(Status::data_loss(
                "this subscriber was too slow: the next batch is no longer held",
            )));
        }
        inner.wakers.insert(place.id, cx.waker().clone());
        Poll::Pending
    }

    /// Forgets a subscriber.
    pub fn leave(&self, place: &Place) {
        self.inner.lock().wakers.remove(&place.id);
    }

    /// Ends every call, and serves nobody.
    fn end_calls(&self, inner: &mut Inner, status: Status) {
        inner.term += 1;
        inner.farewell = status.clone();
        inner.closed = Some(status);
        inner.wake();
        self.metrics.serving.set(self.rank, false);
    }

    fn measure(&self, inner: &Inner) {
        let Some(life) = &inner.life else {
            return self.metrics.measure(self.rank, [0; 5]);
        };
        let history = life.history();
        let [blocks, bytes, left_out] = life.held_sizes();
        let sizes = [history.batches(), history.bytes(), blocks, bytes, left_out];
        let sizes = sizes.map(|size| i64::try_from(size).unwrap_or(i64::MAX));
        self.metrics.measure(self.rank, sizes);
    }
}

impl Inner {
    fn wake(&mut self) {
        for (_, waker) in self.wakers.drain() {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;
    use crate::kv::event::Event;
    use crate::observe::metrics::Registry;

    fn feed() -> Arc<Feed> {
        measured(&Registry::default())
    }

    fn measured(registry: &Registry) -> Arc<Feed> {
        let limits = Limits {
            history_batches: 2,
            history_bytes: 1 << 20,
            state_bytes: 1 << 20,
        };
        Arc::new(Feed::new(0, limits, Metrics::new(registry)))
    }

    fn poll(feed: &Feed, place: &mut Place) -> Option<Result<usize, Code>> {
        let mut cx = Context::from_waker(Waker::noop());
        match feed.poll_next(place, &mut cx) {
            Poll::Pending => None,
            Poll::Ready(said) => Some(
                said.map(|message| message.len())
                    .map_err(|status| status.code()),
            ),
        }
    }

    async fn code(feed: &Arc<Feed>, after: u64) -> Code {
        feed.subscribe(after).await.unwrap_err().code()
    }

    #[tokio::test]
    async fn nobody_is_served_before_there_is_a_life_and_it_is_open() {
        let feed = feed();
        assert_eq!(code(&feed, 0).await, Code::Unavailable);
        assert!(!feed.open());
        feed.begin("a".to_owned(), 100, 0);
        assert_eq!(code(&feed, 0).await, Code::Unavailable);
        assert!(feed.open() && !feed.open());
        assert_eq!(feed.subscribe(0).await.unwrap().epoch, "a");
    }

    #[tokio::test]
    async fn a_new_life_ends_calls_so_that_they_start_over_and_takes_no_number_of_the_old() {
        let feed = feed();
        feed.begin("a".to_owned(), 100, 0);
        feed.open();
        feed.push(Batch::default()).unwrap();
        let mut place = feed.subscribe(101).await.unwrap().place;
        assert_eq!(poll(&feed, &mut place), None);
        // The clock was set back.
        feed.begin("b".to_owned(), 1, 0);
        assert_eq!(poll(&feed, &mut place), Some(Err(Code::DataLoss)));
        feed.open();
        for _ in 0..3 {
            feed.push(Batch::default()).unwrap();
        }
        for old in [100, 101] {
            assert_eq!(code(&feed, old).await, Code::OutOfRange);
        }
    }

    #[tokio::test]
    async fn a_doubt_ends_calls_and_what_is_proved_goes_on() {
        let feed = feed();
        feed.begin("a".to_owned(), 100, 0);
        feed.open();
        feed.push(Batch::default()).unwrap();
        let mut place = feed.subscribe(100).await.unwrap().place;
        assert!(feed.close("lost") && !feed.close("lost"));
        assert_eq!(poll(&feed, &mut place), Some(Err(Code::Unavailable)));
        assert_eq!(code(&feed, 100).await, Code::Unavailable);
        assert!(feed.open());
        let joined = feed.subscribe(100).await.unwrap();
        let mut place = joined.place;
        assert_eq!((joined.epoch.as_str(), joined.last), ("a", 101));
        assert!(matches!(poll(&feed, &mut place), Some(Ok(_))));
        assert_eq!(poll(&feed, &mut place), None);
    }

    #[tokio::test]
    async fn who_is_too_slow_is_cut_off_and_nobody_else() {
        let feed = feed();
        feed.begin("a".to_owned(), 100, 0);
        feed.open();
        feed.push(Batch::default()).unwrap();
        let mut slow = feed.subscribe(100).await.unwrap().place;
        let mut quick = feed.subscribe(100).await.unwrap().place;
        for _ in 0..2 {
            assert!(matches!(poll(&feed, &mut quick), Some(Ok(_))));
            feed.push(Batch::default()).unwrap();
        }
        assert_eq!(poll(&feed, &mut slow), Some(Err(Code::DataLoss)));
        assert!(matches!(poll(&feed, &mut quick), Some(Ok(_))));
    }

    #[test]
    fn it_is_measured_whether_anyone_is_served() {
        let registry = Registry::default();
        let feed = measured(&registry);
        let serves = |expected: u8| {
            let line = format!("warmroute_bridge_serving{{rank=\"0\"}} {expected}\n");
            assert!(registry.text().contains(&line), "{}", registry.text());
        };
        serves(0);
        let strange = Event::Unknown { kind: "New".into() };
        let ends: [&dyn Fn(); 3] = [
            &|| feed.forget("starting over"),
            &|| assert!(feed.close("lost")),
            &|| {
                let events = vec![strange.clone()];
                let batch = Batch {
                    events,
                    ..Batch::default()
                };
                assert!(feed.push(batch).is_err());
            },
        ];
        for end in ends {
            feed.begin("a".to_owned(), 100, 0);
            feed.open();
            serves(1);
            end();
            serves(0);
        }
    }

    #[tokio::test]
    async fn what_cannot_be_translated_is_refused_until_the_next_life() {
        let feed = feed();
        feed.begin("a".to_owned(), 100, 0);
        feed.open();
        let mut place = feed.subscribe(0).await.unwrap().place;
        let strange = Batch {
            events: vec![Event::Unknown { kind: "New".into() }],
            ..Batch::default()
        };
        let why = feed.push(strange).unwrap_err();
        assert!(why.ends_with("an event of type New"), "{why}");
        assert_eq!(poll(&feed, &mut place), Some(Err(Code::FailedPrecondition)));
        assert_eq!(code(&feed, 0).await, Code::FailedPrecondition);
        assert!(!feed.open());
        feed.begin("b".to_owned(), 100, 0);
        assert!(feed.open());
    }
}
