//! What one rank's follower and its subscribers share: the current incarnation, and the subscribers that
//! wait for its next batch.
//!
//! Subscribers have no queues. Each has a cursor, and all read the same messages from the history; a
//! subscriber whose next batch is no longer in the history was too slow, and its call ends.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tonic::Status;

use super::incarnation::{Incarnation, Limits, Start, SubscribeOutcome};
use super::metrics::Metrics;
use super::snapshot::SnapshotJob;
use crate::kv::event::Batch;
use crate::kv::protobuf::LeftOut;

#[derive(Debug)]
pub struct Feed {
    rank: u32,
    limits: Limits,
    metrics: Metrics,
    inner: Mutex<Inner>,
    snapshot_finished: Notify,
}

#[derive(Debug)]
struct Inner {
    incarnation: Option<Incarnation>,
    /// Why subscribers are refused; `None` while they are served.
    closed: Option<Status>,
    /// Incremented to end all calls, which then return `end_status`.
    generation: u64,
    end_status: Status,
    /// The next incarnation's sequence numbers start above this one.
    last_number: u64,
    wakers: HashMap<u64, Waker>,
    subscribers: u64,
}

/// What a new subscriber gets.
#[derive(Debug)]
pub struct Subscribed {
    pub cursor: ReadCursor,
    /// The incarnation's id.
    pub incarnation: String,
    /// The sequence number of the last batch so far.
    pub last: u64,
}

enum Attempt {
    Subscribed(Subscribed),
    MakeSnapshot(Box<SnapshotJob>),
    Wait,
}

/// How far one call has read.
#[derive(Debug)]
pub struct ReadCursor {
    id: u64,
    generation: u64,
    /// The snapshot's messages, and how many of them were sent.
    parts: Arc<[Bytes]>,
    parts_sent: usize,
    next: u64,
}

impl Feed {
    pub fn new(rank: u32, limits: Limits, metrics: Metrics) -> Self {
        metrics.set_serving(rank, false);
        Self {
            rank,
            limits,
            metrics,
            inner: Mutex::new(Inner {
                incarnation: None,
                closed: Some(not_followed()),
                generation: 0,
                end_status: not_followed(),
                last_number: 0,
                wakers: HashMap::new(),
                subscribers: 0,
            }),
            snapshot_finished: Notify::new(),
        }
    }

    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Begins a new incarnation, whose first batch is the next one pushed. Its sequence numbers start at
    /// `number` (the follower passes microseconds since 1970), or above all numbers used before.
    pub fn begin(&self, id: String, number: u64, unknown_before: u64) {
        let mut inner = self.inner.lock();
        self.end(&mut inner, "a new incarnation of the engine begins");
        inner.last_number = number.max(inner.last_number + 1);
        inner.incarnation = Some(Incarnation::new(
            self.rank,
            id,
            inner.last_number,
            unknown_before,
            self.limits,
        ));
        self.metrics.incarnations.inc();
    }

    /// Whether subscribers are served.
    pub fn is_open(&self) -> bool {
        self.inner.lock().closed.is_none()
    }

    pub fn has_incarnation(&self) -> bool {
        self.inner.lock().incarnation.is_some()
    }

    /// Whether the current incarnation has no batch yet, and claims that none came before it.
    pub fn is_blank(&self) -> bool {
        let inner = self.inner.lock();
        let incarnation = inner.incarnation.as_ref();
        incarnation.is_some_and(|incarnation| {
            incarnation.history().batches() == 0 && incarnation.unknown_before() == 0
        })
    }

    /// Ends the current incarnation: its batches are no longer true, or cannot be continued.
    pub fn clear(&self, reason: &str) {
        let mut inner = self.inner.lock();
        self.end(&mut inner, reason);
    }

    fn end(&self, inner: &mut Inner, reason: &str) {
        let Some(incarnation) = inner.incarnation.take() else {
            return;
        };
        inner.last_number = incarnation.number();
        // DATA_LOSS makes every subscriber start over. After another status, one that ignores incarnation
        // ids would try to resume.
        self.end_calls(inner, Status::data_loss(reason));
        inner.closed = Some(not_followed());
        self.measure(inner);
    }

    /// Appends the engine's next batch. Returns the events that have no gRPC message: subscribers go on without them. If
    /// the batch may have removed blocks that it does not name, the incarnation ends.
    pub fn push(&self, batch: Batch) -> Result<Vec<LeftOut>, String> {
        let mut inner = self.inner.lock();
        let Some(incarnation) = inner.incarnation.as_mut() else {
            return Ok(Vec::new());
        };
        let left_out = match incarnation.push(batch) {
            Ok(left_out) => left_out,
            Err(error) => {
                let error = format!("the engine's events cannot be translated: {error}");
                self.end(&mut inner, &error);
                return Err(error);
            }
        };
        for event in &left_out {
            self.metrics.left_out(self.rank, event.reason);
        }
        self.metrics.batches.inc();
        self.measure(&inner);
        inner.wake();
        Ok(left_out)
    }

    /// Serves the current incarnation, if there is one. Returns whether that changed anything.
    pub fn open(&self) -> bool {
        let mut inner = self.inner.lock();
        let opens = inner.incarnation.is_some() && inner.closed.is_some();
        if opens {
            inner.closed = None;
            self.metrics.set_serving(self.rank, true);
        }
        opens
    }

    /// Stops serving, but keeps the incarnation, which may continue. Returns whether that changed
    /// anything.
    pub fn close(&self, reason: &str) -> bool {
        let mut inner = self.inner.lock();
        let closes = inner.closed.is_none();
        if closes {
            self.end_calls(&mut inner, Status::unavailable(reason));
        }
        closes
    }

    /// Why subscribers are refused, if they are.
    pub fn closed(&self) -> Option<Status> {
        self.inner.lock().closed.clone()
    }

    /// Subscribes a client that has all batches up to `after`; 0: none. Waits while a snapshot is made.
    pub async fn subscribe(self: &Arc<Self>, after: u64) -> Result<Subscribed, Status> {
        let mut has_waited = false;
        loop {
            let mut finished = std::pin::pin!(self.snapshot_finished.notified());
            // Before the attempt: the snapshot might be finished between the two.
            finished.as_mut().enable();
            match self.try_subscribe(after, has_waited)? {
                Attempt::Subscribed(subscribed) => return Ok(subscribed),
                Attempt::MakeSnapshot(job) => {
                    let feed = self.clone();
                    // On another thread, so that other calls go on; and it completes even if this call
                    // is cancelled.
                    let made = tokio::task::spawn_blocking(move || feed.make_snapshot(*job)).await;
                    made.map_err(|error| Status::internal(error.to_string()))?;
                }
                Attempt::Wait => finished.await,
            }
            has_waited = true;
        }
    }

    /// Runs without the lock: a million blocks take about a second.
    fn make_snapshot(&self, job: SnapshotJob) {
        let id = job.incarnation.clone();
        match std::panic::catch_unwind(AssertUnwindSafe(|| job.make())) {
            Ok(snapshot) => {
                let mut inner = self.inner.lock();
                let incarnation = inner.incarnation.as_mut();
                if let Some(incarnation) = incarnation.filter(|incarnation| incarnation.id() == id)
                {
                    incarnation.snapshot_finished(snapshot);
                    self.measure(&inner);
                }
            }
            // The incarnation's block state was lost in the panic.
            Err(_) => self.clear("the snapshot could not be made"),
        }
        self.snapshot_finished.notify_waiters();
    }

    fn try_subscribe(&self, after: u64, has_waited: bool) -> Result<Attempt, Status> {
        let mut inner = self.inner.lock();
        if let Some(status) = &inner.closed {
            return Err(status.clone());
        }
        let incarnation = inner.incarnation.as_mut().ok_or_else(not_followed)?;
        let outcome = incarnation.subscribe(after, has_waited).map_err(|gone| {
            Status::out_of_range(format!(
                "batches after {after} are not in the history; those after {} are",
                gone.oldest
            ))
        });
        let Start { parts, next } = match outcome? {
            SubscribeOutcome::Now(start) => start,
            SubscribeOutcome::MakeSnapshot(job) => return Ok(Attempt::MakeSnapshot(job)),
            SubscribeOutcome::Wait => return Ok(Attempt::Wait),
            SubscribeOutcome::Busy => {
                self.metrics.refused.inc();
                return Err(Status::unavailable(
                    "as many snapshots as allowed are still being read",
                ));
            }
        };
        let (id, last) = (incarnation.id().to_owned(), incarnation.number());
        inner.subscribers += 1;
        let cursor = ReadCursor {
            id: inner.subscribers,
            generation: inner.generation,
            parts,
            parts_sent: 0,
            next,
        };
        Ok(Attempt::Subscribed(Subscribed {
            cursor,
            incarnation: id,
            last,
        }))
    }

    /// The next message for a subscriber, or the status that its call ends with.
    pub fn poll_next(
        &self,
        cursor: &mut ReadCursor,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Bytes, Status>> {
        let mut inner = self.inner.lock();
        if cursor.generation != inner.generation {
            return Poll::Ready(Err(inner.end_status.clone()));
        }
        let Some(incarnation) = &inner.incarnation else {
            return Poll::Ready(Err(inner.end_status.clone()));
        };
        let is_kept = cursor.next >= incarnation.history().first();
        if let Some(part) = cursor.parts.get(cursor.parts_sent).filter(|_| is_kept) {
            cursor.parts_sent += 1;
            return Poll::Ready(Ok(part.clone()));
        }
        // Frees the snapshot's memory if this was its last reader.
        cursor.parts = Arc::default();
        cursor.parts_sent = 0;
        if let Some(message) = incarnation.history().get(cursor.next) {
            cursor.next += 1;
            return Poll::Ready(Ok(message.clone()));
        }
        if !is_kept {
            self.metrics.slow.inc();
            return Poll::Ready(Err(Status::data_loss(
                "this subscriber was too slow: its next batch is no longer in the history",
            )));
        }
        inner.wakers.insert(cursor.id, cx.waker().clone());
        Poll::Pending
    }

    /// Removes a subscriber.
    pub fn leave(&self, cursor: &ReadCursor) {
        self.inner.lock().wakers.remove(&cursor.id);
    }

    /// Ends every call, and refuses new ones, with `status`.
    fn end_calls(&self, inner: &mut Inner, status: Status) {
        inner.generation += 1;
        inner.end_status = status.clone();
        inner.closed = Some(status);
        inner.wake();
        self.metrics.set_serving(self.rank, false);
    }

    fn measure(&self, inner: &Inner) {
        let Some(incarnation) = &inner.incarnation else {
            return self.metrics.measure(self.rank, [0; 5]);
        };
        let history = incarnation.history();
        let [blocks, bytes, missing] = incarnation.block_sizes();
        let sizes = [history.batches(), history.bytes(), blocks, bytes, missing];
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

fn not_followed() -> Status {
    Status::unavailable("the engine's KV events are not followed yet")
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

    fn poll(feed: &Feed, cursor: &mut ReadCursor) -> Option<Result<usize, Code>> {
        let mut cx = Context::from_waker(Waker::noop());
        match feed.poll_next(cursor, &mut cx) {
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
    async fn subscribers_are_refused_until_an_incarnation_is_open() {
        let feed = feed();
        assert_eq!(code(&feed, 0).await, Code::Unavailable);
        assert!(!feed.open());
        feed.begin("a".to_owned(), 100, 0);
        assert_eq!(code(&feed, 0).await, Code::Unavailable);
        assert!(feed.open() && !feed.open());
        assert_eq!(feed.subscribe(0).await.unwrap().incarnation, "a");
    }

    #[tokio::test]
    async fn a_new_incarnation_ends_calls_and_reuses_no_sequence_number() {
        let feed = feed();
        feed.begin("a".to_owned(), 100, 0);
        feed.open();
        feed.push(Batch::default()).unwrap();
        let mut cursor = feed.subscribe(101).await.unwrap().cursor;
        assert_eq!(poll(&feed, &mut cursor), None);
        // The clock was set back.
        feed.begin("b".to_owned(), 1, 0);
        assert_eq!(poll(&feed, &mut cursor), Some(Err(Code::DataLoss)));
        feed.open();
        for _ in 0..3 {
            feed.push(Batch::default()).unwrap();
        }
        for old in [100, 101] {
            assert_eq!(code(&feed, old).await, Code::OutOfRange);
        }
    }

    #[tokio::test]
    async fn closing_ends_calls_and_reopening_continues_the_incarnation() {
        let feed = feed();
        feed.begin("a".to_owned(), 100, 0);
        feed.open();
        feed.push(Batch::default()).unwrap();
        let mut cursor = feed.subscribe(100).await.unwrap().cursor;
        assert!(feed.close("lost") && !feed.close("lost"));
        assert_eq!(poll(&feed, &mut cursor), Some(Err(Code::Unavailable)));
        assert_eq!(code(&feed, 100).await, Code::Unavailable);
        assert!(feed.open());
        let subscribed = feed.subscribe(100).await.unwrap();
        let mut cursor = subscribed.cursor;
        assert_eq!(
            (subscribed.incarnation.as_str(), subscribed.last),
            ("a", 101)
        );
        assert!(matches!(poll(&feed, &mut cursor), Some(Ok(_))));
        assert_eq!(poll(&feed, &mut cursor), None);
    }

    #[tokio::test]
    async fn only_the_slow_subscriber_is_cut_off() {
        let feed = feed();
        feed.begin("a".to_owned(), 100, 0);
        feed.open();
        feed.push(Batch::default()).unwrap();
        let mut slow = feed.subscribe(100).await.unwrap().cursor;
        let mut quick = feed.subscribe(100).await.unwrap().cursor;
        for _ in 0..2 {
            assert!(matches!(poll(&feed, &mut quick), Some(Ok(_))));
            feed.push(Batch::default()).unwrap();
        }
        assert_eq!(poll(&feed, &mut slow), Some(Err(Code::DataLoss)));
        assert!(matches!(poll(&feed, &mut quick), Some(Ok(_))));
    }

    #[test]
    fn the_serving_gauge_follows_every_end() {
        let registry = Registry::default();
        let feed = measured(&registry);
        let serves = |expected: u8| {
            let line = format!("warmroute_bridge_serving{{rank=\"0\"}} {expected}\n");
            assert!(registry.text().contains(&line), "{}", registry.text());
        };
        serves(0);
        let strange = Event::Unknown {
            kind: "New".into(),
            hashes: None,
        };
        let ends: [&dyn Fn(); 3] = [
            &|| feed.clear("starting over"),
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
    async fn a_batch_that_may_have_removed_anything_ends_the_incarnation() {
        let feed = feed();
        feed.begin("a".to_owned(), 100, 0);
        feed.open();
        let mut cursor = feed.subscribe(0).await.unwrap().cursor;
        let strange = Batch {
            events: vec![Event::Unknown {
                kind: "New".into(),
                hashes: None,
            }],
            ..Batch::default()
        };
        let why = feed.push(strange).unwrap_err();
        assert!(why.ends_with("an event of type New"), "{why}");
        assert_eq!(poll(&feed, &mut cursor), Some(Err(Code::DataLoss)));
        assert_eq!(code(&feed, 0).await, Code::Unavailable);
        assert!(!feed.open());
        feed.begin("b".to_owned(), 100, 0);
        assert!(feed.open());
    }
}
