//! What one connection is doing, seen from its reads and writes, and whether that takes too long.
//!
//! A connection records only changes (the first byte of a request head, a request started or ended, a
//! blocked write), and one timer per connection checks the record now and then. A timer for each request
//! would cost more.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use http_body::Body;
use hyper::Version;
use hyper::body::Incoming;
use parking_lot::Mutex;

use super::settings::Settings;
use crate::observe;

/// A body that nobody wants is read up to this size. For a longer one the connection is closed.
const DISCARDED_BYTES: u64 = 64 << 10;
/// hyper hands a body that it has read already over within so many turns of the task. Nobody waits for one that has not come.
const DISCARD_TURNS: u32 = 4;

/// An HTTP/2 stream whose request's body was not wanted stays open for so long after its response. Its client may send
/// what it still has a window for, which h2 drops, and is granted no more. Were the stream reset at once, h2 would
/// count each frame that comes for it as an error, unless it is among the latest few streams, and at 1,024 of them end
/// the connection with all that run on it. In this time a stream's window comes over 1 Mbit/s.
const LEFT_OPEN_FOR: Duration = Duration::from_secs(2);
/// So many at a time, which is half of the streams that a client's connection may have: the others are for requests.
/// Those beyond are reset at once, so a connection on which more uploads than this are refused in each
/// [`LEFT_OPEN_FOR`] can still end so: h2 counts late frames of honest clients and attackers alike, and forgets none.
const LEFT_OPEN_MAX: u32 = 512;

/// The time-outs of a connection: for a request's head, without a request, and for a client that does not read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) head: Duration,
    pub(super) idle: Duration,
    pub(super) send: Duration,
}

impl Limits {
    pub(super) fn new(settings: &Settings) -> Self {
        Self {
            head: settings.header_timeout,
            idle: settings.idle_timeout,
            send: settings.send_timeout,
        }
    }

    /// These time-outs with no longer idle time than `idle`.
    pub(super) fn idle_at_most(self, idle: Duration) -> Self {
        Self {
            idle: self.idle.min(idle),
            ..self
        }
    }

    /// How often to check: no time-out is noticed later than half its length.
    pub(super) fn look_every(&self) -> Duration {
        (self.head.min(self.idle).min(self.send) / 2).max(Duration::from_millis(10))
    }
}

/// What [`Activity::check`] finds. All but `Fine` close the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Fine,
    /// No request for `idle`.
    Idle,
    /// A request's head was not complete within `head`.
    SlowHead,
    /// The client has read nothing for `send`, although data waits for it.
    NotReading,
}

#[derive(Debug)]
pub(super) struct Activity {
    /// When the connection was opened. The fields in `_ms` are milliseconds since then.
    opened: Instant,
    /// Requests in progress.
    requests: AtomicU32,
    /// A part of the next request's head has come.
    in_head: AtomicBool,
    http2: AtomicBool,
    /// The handler has an HTTP/1 request's body that has not come to its end.
    in_body: AtomicBool,
    /// A request's body was dropped before its end: what follows on the connection is no request's head.
    has_unread_body: AtomicBool,
    /// The body that was dropped, if what is left of it may be read.
    unread_body: Mutex<Option<Incoming>>,
    /// When the connection became idle, which it is not before its last answer has gone out, or when the first byte of
    /// the head came.
    since_ms: AtomicU64,
    /// When a write first found the socket's buffer full; 0 while writes succeed.
    blocked_ms: AtomicU64,
    /// The task of a response body that waits for the socket.
    waiting_body: Mutex<Option<Waker>>,
    /// The number of the current period. A period is half a send time-out; `check` begins the next one.
    period: AtomicU32,
    period_began_ms: AtomicU64,
    /// The HTTP/2 streams, ended ones among them until the next clean-up.
    streams: Mutex<Streams>,
    /// Those that stay open after their responses.
    left_open: AtomicU32,
}

/// A stream that has waited since this many periods before the current one has waited for longer than a send time-out:
/// two complete periods, and parts of the first one.
const PERIODS: u32 = 3;

#[derive(Debug, Default)]
struct Streams {
    all: Vec<Weak<StreamWatch>>,
    /// When there are this many, ended ones are removed.
    clean_up_at: usize,
    /// The stream of the request that began last, until its task is started.
    newest: Option<Arc<StreamWatch>>,
}

/// Whether one HTTP/2 stream's client takes its response, and may send more. The socket stays writable while the
/// client's flow-control window is closed, so `blocked_ms` cannot show this.
#[derive(Debug, Default)]
pub(super) struct StreamWatch {
    /// The request's body was dropped before its end.
    has_unread_body: AtomicBool,
    /// It stays open after its response.
    is_left_open: AtomicBool,
    /// One more than the period in which hyper took a frame that still waits for the client's window; 0 for none.
    waiting_since: AtomicU32,
    is_stalled: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl StreamWatch {
    /// Runs a stream's task until it ends or the stream stalls. Dropping the task resets the stream alone, unless both
    /// sides have ended it. True if it stalled.
    pub(super) async fn run(self: Arc<Self>, task: impl Future<Output = ()>) -> bool {
        let mut task = pin!(task);
        let mut has_waker = false;
        let is_stalled = poll_fn(|cx| {
            if !has_waker {
                // Once is enough: a task keeps its waker.
                has_waker = true;
                *self.waker.lock() = Some(cx.waker().clone());
            }
            if self.is_stalled.load(Relaxed) {
                return Poll::Ready(true);
            }
            task.as_mut().poll(cx).map(|()| false)
        })
        .await;
        if !is_stalled && self.is_left_open.load(Relaxed) {
            tokio::time::sleep(LEFT_OPEN_FOR).await;
        }
        is_stalled
    }

    /// The request's body was dropped before its end.
    pub(super) fn leave_body_unread(&self) {
        self.has_unread_body.store(true, Relaxed);
    }

    fn is_stalled(&self, period: u32) -> bool {
        let since = self.waiting_since.load(Relaxed);
        since != 0 && period.wrapping_sub(since - 1) >= PERIODS
    }

    fn wake(&self) {
        if let Some(waker) = &*self.waker.lock() {
            waker.wake_by_ref();
        }
    }

    fn end(&self) {
        self.is_stalled.store(true, Relaxed);
        if let Some(waker) = self.waker.lock().take() {
            waker.wake();
        }
    }
}

impl Streams {
    fn add(&mut self, watch: &Arc<StreamWatch>) {
        if self.all.len() >= self.clean_up_at {
            self.all.retain(|watch| watch.strong_count() > 0);
            self.clean_up_at = (2 * self.all.len()).max(64);
        }
        self.all.push(Arc::downgrade(watch));
        self.newest = Some(watch.clone());
    }
}

/// Marks a request as running until it is dropped.
#[derive(Debug)]
pub(super) struct Busy {
    activity: Arc<Activity>,
    /// The stream of an HTTP/2 request.
    stream: Option<Arc<StreamWatch>>,
}

impl Activity {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            opened: now,
            requests: AtomicU32::new(0),
            in_head: AtomicBool::new(false),
            http2: AtomicBool::new(false),
            in_body: AtomicBool::new(false),
            has_unread_body: AtomicBool::new(false),
            unread_body: Mutex::default(),
            since_ms: AtomicU64::new(0),
            blocked_ms: AtomicU64::new(0),
            waiting_body: Mutex::default(),
            period: AtomicU32::new(0),
            period_began_ms: AtomicU64::new(0),
            streams: Mutex::default(),
            left_open: AtomicU32::new(0),
        }
    }

    pub(super) fn begin(self: &Arc<Self>, version: Version) -> Busy {
        self.requests.fetch_add(1, Relaxed);
        self.in_head.store(false, Relaxed);
        let stream = (version == Version::HTTP_2).then(|| {
            self.http2.store(true, Relaxed);
            let watch = Arc::new(StreamWatch::default());
            self.streams.lock().add(&watch);
            watch
        });
        Busy {
            activity: self.clone(),
            stream,
        }
    }

    /// The stream of the request that began last. hyper starts a stream's task at once after it has called the
    /// service.
    pub(super) fn take_newest_stream(&self) -> Option<Arc<StreamWatch>> {
        self.streams.lock().newest.take()
    }

    /// Begins the next period when it is time, and ends the streams whose clients have granted no window for longer
    /// than the send time-out.
    pub(super) fn end_stalled_streams(&self, now: Instant, limits: &Limits) {
        let now_ms = self.ms(now);
        let began_ms = self.period_began_ms.load(Relaxed);
        if now_ms.saturating_sub(began_ms) <= limits.send.as_millis() as u64 / 2 {
            return;
        }
        let period = self.period.load(Relaxed).wrapping_add(1);
        self.period_began_ms.store(now_ms, Relaxed);
        self.period.store(period, Relaxed);
        let streams = self.streams.lock();
        let watches = streams.all.iter().filter_map(Weak::upgrade);
        for watch in watches.filter(|watch| watch.is_stalled(period)) {
            watch.end();
        }
    }

    /// Has the tasks of all streams polled.
    pub(super) fn wake_streams(&self) {
        let streams = self.streams.lock();
        for watch in streams.all.iter().filter_map(Weak::upgrade) {
            watch.wake();
        }
    }

    pub(super) fn check(&self, now: Instant, limits: &Limits) -> Verdict {
        let now_ms = self.ms(now);
        let blocked_ms = self.blocked_ms.load(Relaxed);
        if blocked_ms != 0 {
            // Also without a request: hyper drops a body when it takes its last frame, and may have sent nothing of it.
            let is_late = now_ms.saturating_sub(blocked_ms) > limits.send.as_millis() as u64;
            return if is_late {
                Verdict::NotReading
            } else {
                Verdict::Fine
            };
        }
        if self.has_requests() {
            return Verdict::Fine;
        }
        let waited = Duration::from_millis(now_ms.saturating_sub(self.since_ms.load(Relaxed)));
        let (limit, late) = if self.in_head.load(Relaxed) && !self.is_http2() {
            (limits.head, Verdict::SlowHead)
        } else {
            (limits.idle, Verdict::Idle)
        };
        if waited > limit { late } else { Verdict::Fine }
    }

    /// True if an HTTP/1 connection has been between two requests for this long, with nothing left to read or write.
    pub(super) fn is_between_requests(&self, now: Instant, at_least: Duration) -> bool {
        let waited = self.ms(now).saturating_sub(self.since_ms.load(Relaxed));
        !self.has_requests()
            && !self.in_head.load(Relaxed)
            && !self.http2.load(Relaxed)
            && !self.has_unread_body.load(Relaxed)
            && self.blocked_ms.load(Relaxed) == 0
            && waited >= at_least.as_millis() as u64
    }

    pub(super) fn is_http2(&self) -> bool {
        self.http2.load(Relaxed)
    }

    pub(super) fn has_requests(&self) -> bool {
        self.requests.load(Relaxed) > 0
    }

    pub(super) fn begin_body(&self) {
        self.in_body.store(true, Relaxed);
    }

    pub(super) fn end_body(&self) {
        self.in_body.store(false, Relaxed);
    }

    /// A request's body was dropped before its end.
    pub(super) fn leave_body_unread(&self, body: Option<Incoming>) {
        self.in_body.store(false, Relaxed);
        self.has_unread_body.store(true, Relaxed);
        *self.unread_body.lock() = body;
    }

    /// True if the body of the HTTP/1 request that has its response now was not read to its end, nor can be at once: the
    /// connection cannot be used again.
    pub(super) async fn leaves_body_unread(&self) -> bool {
        if self.in_body.load(Relaxed) {
            return true;
        }
        if !self.has_unread_body.load(Relaxed) {
            return false;
        }
        let body = self.unread_body.lock().take();
        let is_read = match body {
            Some(body) => discard(body).await,
            None => false,
        };
        if is_read {
            self.has_unread_body.store(false, Relaxed);
        }
        !is_read
    }

    /// True while what comes over an HTTP/1 connection is behind the request that runs. If the rest of its body may still
    /// come, that does not count.
    pub(super) fn is_behind_request(&self) -> bool {
        self.has_requests() && !self.in_body.load(Relaxed) && !self.http2.load(Relaxed)
    }

    pub(super) fn has_unread_body(&self) -> bool {
        self.has_unread_body.load(Relaxed)
    }

    /// True if an HTTP/1 connection has ended in the middle of a request: of its body, or of a head that was refused.
    pub(super) fn leaves_bytes_unread(&self) -> bool {
        self.has_unread_body() || self.in_head.load(Relaxed)
    }

    pub(super) fn on_read(&self, bytes: &[u8]) {
        // The first bytes of an HTTP/2 connection, which has no head of its own.
        if bytes.starts_with(b"PRI ") {
            self.http2.store(true, Relaxed);
        }
        if self.requests.load(Relaxed) == 0 && !self.in_head.load(Relaxed) {
            self.since_ms.store(self.ms(observe::now()), Relaxed);
            self.in_head.store(true, Relaxed);
        }
    }

    pub(super) fn on_write(&self, blocked: bool) {
        match (blocked, self.blocked_ms.load(Relaxed)) {
            (true, 0) => self
                .blocked_ms
                .store(self.ms(observe::now()).max(1), Relaxed),
            (false, since) if since != 0 => {
                self.blocked_ms.store(0, Relaxed);
                if !self.has_requests() {
                    self.since_ms.store(self.ms(observe::now()), Relaxed);
                }
                if let Some(waker) = self.waiting_body.lock().take() {
                    waker.wake();
                }
            }
            _ => {}
        }
    }

    fn ms(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.opened).as_millis() as u64
    }
}

impl Busy {
    pub(super) fn is_http2(&self) -> bool {
        self.stream.is_some()
    }

    pub(super) fn stream(&self) -> Option<&Arc<StreamWatch>> {
        self.stream.as_ref()
    }

    /// True if the request's body was dropped before its end over HTTP/2, whose stream may then stay open.
    pub(super) fn has_unread_body(&self) -> bool {
        let stream = self.stream.as_ref();
        stream.is_some_and(|stream| stream.has_unread_body.load(Relaxed))
    }

    /// The response has ended. True if its stream stays open for a while, with the task that has this.
    pub(super) fn leave_open(&self) -> bool {
        let Some(stream) = &self.stream else {
            return false;
        };
        if stream.is_left_open.load(Relaxed) {
            return true;
        }
        let add = |open: u32| (open < LEFT_OPEN_MAX).then_some(open + 1);
        let added = self.activity.left_open.fetch_update(Relaxed, Relaxed, add);
        stream.is_left_open.store(added.is_ok(), Relaxed);
        added.is_ok()
    }

    /// True while the socket of an HTTP/1 connection takes nothing. hyper would keep 16 frames in memory, each with the
    /// buffer that it was read into; they can wait in the engine's socket. The task is woken when bytes go out again.
    pub(super) fn must_wait(&self, cx: &Context<'_>) -> bool {
        let must_wait = !self.is_http2() && self.activity.blocked_ms.load(Relaxed) != 0;
        if must_wait {
            *self.activity.waiting_body.lock() = Some(cx.waker().clone());
        }
        must_wait
    }

    /// hyper took a frame of the response body. Over HTTP/1 the socket itself shows whether the client reads.
    pub(super) fn on_frame(&self) {
        if let Some(stream) = &self.stream {
            let period = self.activity.period.load(Relaxed);
            stream.waiting_since.store(period.wrapping_add(1), Relaxed);
        }
    }

    /// hyper asks for the next frame, so it has sent the last one.
    pub(super) fn on_poll(&self) {
        if let Some(stream) = &self.stream {
            stream.waiting_since.store(0, Relaxed);
        }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.on_poll();
        let activity = &self.activity;
        let stream = self.stream.as_ref();
        if stream.is_some_and(|stream| stream.is_left_open.load(Relaxed)) {
            activity.left_open.fetch_sub(1, Relaxed);
        }
        if activity.requests.fetch_sub(1, Relaxed) == 1 {
            activity
                .since_ms
                .store(activity.ms(observe::now()), Relaxed);
        }
    }
}

/// Reads what is left of a body that nobody wants. True if that was all there at once.
async fn discard(mut body: Incoming) -> bool {
    let longest = body.size_hint().upper();
    if longest.is_none_or(|bytes| bytes > DISCARDED_BYTES) {
        return false;
    }
    for _ in 0..DISCARD_TURNS {
        let polled = poll_fn(|cx| Poll::Ready(Pin::new(&mut body).poll_frame(cx))).await;
        match polled {
            Poll::Ready(None) => return true,
            Poll::Ready(Some(Err(_))) => return false,
            Poll::Ready(Some(Ok(_))) if body.is_end_stream() => return true,
            Poll::Ready(Some(Ok(_))) => {}
            Poll::Pending => tokio::task::yield_now().await,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::task::Wake;

    use super::*;

    const LIMITS: Limits = Limits {
        head: Duration::from_secs(10),
        idle: Duration::from_secs(60),
        send: Duration::from_secs(30),
    };

    fn after(activity: &Activity, seconds: u64) -> Verdict {
        activity.check(activity.opened + Duration::from_secs(seconds), &LIMITS)
    }

    #[test]
    fn a_connection_without_a_request_is_idle_after_the_limit() {
        let activity = Activity::new(observe::now());
        assert_eq!(after(&activity, 60), Verdict::Fine);
        assert_eq!(after(&activity, 61), Verdict::Idle);
    }

    #[test]
    fn a_request_head_that_has_started_must_end_within_its_own_timeout() {
        let activity = Activity::new(observe::now());
        activity.on_read(b"GET ");
        assert_eq!(after(&activity, 9), Verdict::Fine);
        assert_eq!(after(&activity, 12), Verdict::SlowHead);
    }

    #[test]
    fn a_running_request_is_never_idle() {
        let activity = Arc::new(Activity::new(observe::now()));
        activity.on_read(b"GET ");
        let busy = activity.begin(Version::HTTP_11);
        assert_eq!(after(&activity, 3600), Verdict::Fine);
        drop(busy);
        assert_eq!(after(&activity, 3600), Verdict::Idle);
    }

    #[test]
    fn a_connection_is_between_requests_only_if_nothing_is_left_to_read_or_write() {
        let activity = Arc::new(Activity::new(observe::now()));
        let is_between = |seconds| {
            let now = activity.opened + Duration::from_secs(seconds);
            activity.is_between_requests(now, Duration::from_secs(1))
        };
        activity.on_read(b"GET ");
        assert!(!is_between(5), "a head has started");
        let busy = activity.begin(Version::HTTP_11);
        assert!(!is_between(5), "a request runs");
        drop(busy);
        assert!(is_between(5));
        assert!(!is_between(0), "it may go on at once");
        activity.on_write(true);
        assert!(!is_between(5), "a response waits");
        activity.on_write(false);
        assert!(is_between(5));
        activity.leave_body_unread(None);
        assert!(!is_between(5), "the rest of a body may follow");
    }

    #[test]
    fn a_client_that_reads_nothing_is_disconnected_even_while_a_request_runs() {
        let activity = Arc::new(Activity::new(observe::now()));
        let busy = activity.begin(Version::HTTP_11);
        activity.on_write(true);
        assert_eq!(after(&activity, 29), Verdict::Fine);
        assert_eq!(after(&activity, 32), Verdict::NotReading);
        activity.on_write(false);
        assert_eq!(after(&activity, 32), Verdict::Fine);
        drop(busy);
    }

    #[test]
    fn a_connection_is_not_idle_while_its_last_answer_goes_out() {
        // Seconds: since when there is no request, since when a write is blocked (0: none is), and now.
        for (idle, blocked, now, verdict) in [
            (1, 0, 61, Verdict::Fine),
            (1, 0, 62, Verdict::Idle),
            (1, 60, 62, Verdict::Fine),
            (1, 3_000, 3_030, Verdict::Fine),
            (1, 3_000, 3_031, Verdict::NotReading),
            // All of it has gone out.
            (3_010, 0, 3_070, Verdict::Fine),
            (3_010, 0, 3_071, Verdict::Idle),
        ] {
            let activity = Activity::new(observe::now());
            activity.since_ms.store(idle * 1_000, Relaxed);
            activity.blocked_ms.store(blocked * 1_000, Relaxed);
            assert_eq!(after(&activity, now), verdict, "{idle}, {blocked}, {now}");
        }
    }

    #[test]
    fn the_idle_time_begins_when_the_rest_of_the_last_answer_has_gone_out() {
        const BEFORE: u64 = u64::MAX;
        for (has_request, was_blocked, begins) in [
            (false, true, true),
            (false, false, false),
            (true, true, false),
        ] {
            let activity = Arc::new(Activity::new(observe::now()));
            let busy = has_request.then(|| activity.begin(Version::HTTP_11));
            activity.on_write(was_blocked);
            activity.since_ms.store(BEFORE, Relaxed);
            activity.on_write(false);
            let has_begun = activity.since_ms.load(Relaxed) != BEFORE;
            assert_eq!(has_begun, begins, "{has_request}, {was_blocked}");
            drop(busy);
        }
    }

    #[test]
    fn a_response_waits_while_the_socket_takes_nothing() {
        let activity = Arc::new(Activity::new(observe::now()));
        let busy = activity.begin(Version::HTTP_11);
        let cx = &Context::from_waker(Waker::noop());
        assert!(!busy.must_wait(cx));
        activity.on_write(true);
        assert!(busy.must_wait(cx));
        assert!(activity.waiting_body.lock().is_some());
        activity.on_write(false);
        assert!(activity.waiting_body.lock().is_none(), "it was woken");
        assert!(!busy.must_wait(cx));
        let stream = activity.begin(Version::HTTP_2);
        activity.on_write(true);
        assert!(!stream.must_wait(cx), "streams have windows of their own");
    }

    #[test]
    fn an_http2_connection_before_its_first_request_has_the_idle_limit() {
        let activity = Activity::new(observe::now());
        activity.on_read(b"PRI * HTTP/2.0\r\n");
        assert_eq!(after(&activity, 60), Verdict::Fine);
        assert_eq!(after(&activity, 61), Verdict::Idle);
    }

    fn look(activity: &Activity, seconds: u64) {
        activity.end_stalled_streams(activity.opened + Duration::from_secs(seconds), &LIMITS);
    }

    fn is_ended(busy: &Busy) -> bool {
        busy.stream.as_ref().unwrap().is_stalled.load(Relaxed)
    }

    #[test]
    fn only_the_stream_whose_window_stays_closed_ends() {
        let activity = Arc::new(Activity::new(observe::now()));
        let stalled = activity.begin(Version::HTTP_2);
        let healthy = activity.begin(Version::HTTP_2);
        let silent = activity.begin(Version::HTTP_2);
        stalled.on_frame();
        for number in 1..4 {
            assert!(!is_ended(&stalled), "{number}");
            healthy.on_poll();
            healthy.on_frame();
            look(&activity, 16 * number);
        }
        assert!(is_ended(&stalled));
        assert!(!is_ended(&healthy) && !is_ended(&silent));
        assert_eq!(after(&activity, 48), Verdict::Fine);
    }

    struct IsWoken(AtomicBool);

    impl Wake for IsWoken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Relaxed);
        }
    }

    #[test]
    fn a_stream_that_waits_can_be_woken_with_all_others() {
        let activity = Arc::new(Activity::new(observe::now()));
        let _busy = activity.begin(Version::HTTP_2);
        let watch = activity.take_newest_stream().unwrap();
        let mut running = pin!(watch.run(pending()));
        let is_woken = Arc::new(IsWoken(AtomicBool::new(false)));
        let waker = Waker::from(is_woken.clone());
        let polled = running.as_mut().poll(&mut Context::from_waker(&waker));
        assert!(polled.is_pending());
        activity.wake_streams();
        assert!(is_woken.0.load(Relaxed));
    }

    #[test]
    fn streams_whose_bodies_were_not_read_leave_room_for_others_while_they_stay_open() {
        let activity = Arc::new(Activity::new(observe::now()));
        let begin = || activity.begin(Version::HTTP_2);
        let unread = begin();
        assert!(!unread.has_unread_body());
        unread.stream().unwrap().leave_body_unread();
        assert!(unread.has_unread_body());
        let mut open: Vec<Busy> = (0..LEFT_OPEN_MAX).map(|_| begin()).collect();
        assert!(open.iter().all(Busy::leave_open));
        assert!(open[0].leave_open(), "it counts once");
        assert!(!unread.leave_open());
        open.pop();
        assert!(unread.leave_open());
        drop((open, unread));
        assert_eq!(activity.left_open.load(Relaxed), 0);
        assert!(!activity.begin(Version::HTTP_11).leave_open());
    }

    #[tokio::test]
    async fn the_task_of_a_stream_that_stays_open_is_not_dropped_when_it_ends() {
        let activity = Arc::new(Activity::new(observe::now()));
        let cx = &mut Context::from_waker(Waker::noop());
        for stays_open in [false, true] {
            let busy = activity.begin(Version::HTTP_2);
            let watch = activity.take_newest_stream().unwrap();
            assert!(!stays_open || busy.leave_open());
            let mut task = pin!(watch.run(async {}));
            assert_eq!(task.as_mut().poll(cx).is_pending(), stays_open);
        }
    }

    #[test]
    fn streams_that_have_ended_are_not_kept() {
        let activity = Arc::new(Activity::new(observe::now()));
        for _ in 0..10_000 {
            drop(activity.begin(Version::HTTP_2));
            drop(activity.take_newest_stream());
        }
        assert!(activity.streams.lock().all.len() <= 64);
    }

    #[test]
    fn over_http1_only_the_socket_shows_whether_the_client_reads() {
        let activity = Arc::new(Activity::new(observe::now()));
        let busy = activity.begin(Version::HTTP_11);
        busy.on_frame();
        for look in 1..20 {
            assert_eq!(after(&activity, 16 * look), Verdict::Fine);
        }
    }
}
