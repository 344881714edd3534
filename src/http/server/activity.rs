//! What one connection is doing, seen from its reads and writes, and whether that takes too long.
//!
//! A connection records only changes (the first byte of a request head, a request begun or ended, a
//! blocked write), and one timer per connection checks the record now and then. A timer for each request
//! would cost more.

use std::io;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::Version;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::observe;

/// The time-outs of a connection: for a request's head, without a request, and for a client that does not read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) head: Duration,
    pub(super) idle: Duration,
    pub(super) send: Duration,
}

impl Limits {
    /// The same with no longer idle time than this.
    pub(super) fn at_limit(self, idle: Duration) -> Self {
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
    /// When the connection became idle, or when the first byte of the head came.
    since_ms: AtomicU64,
    /// When a write first found the socket's buffer full; 0 while writes succeed.
    blocked_ms: AtomicU64,
    /// The number of the current period. A period is half a send time-out; `check` begins the next one.
    period: AtomicU32,
    period_began_ms: AtomicU64,
    /// HTTP/2 response bodies with a frame that waits for the client's flow-control window, by the period
    /// in which the frame came. The socket stays writable meanwhile, so `blocked_ms` cannot show this.
    window_waits: [AtomicU32; PERIODS],
}

/// Two complete periods (a whole send time-out), the current one, and the one before, which [`Activity::check`] reads.
const PERIODS: usize = 4;

/// Marks a request as running until it is dropped.
pub(super) struct Busy {
    activity: Arc<Activity>,
    http2: bool,
    /// Set from when hyper takes a frame of the body until it asks for the next one: the index in `window_waits`.
    window_wait: Option<usize>,
}

impl Activity {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            opened: now,
            requests: AtomicU32::new(0),
            in_head: AtomicBool::new(false),
            http2: AtomicBool::new(false),
            since_ms: AtomicU64::new(0),
            blocked_ms: AtomicU64::new(0),
            period: AtomicU32::new(0),
            period_began_ms: AtomicU64::new(0),
            window_waits: Default::default(),
        }
    }

    pub(super) fn begin(self: &Arc<Self>, version: Version) -> Busy {
        self.requests.fetch_add(1, Relaxed);
        self.in_head.store(false, Relaxed);
        let http2 = version == Version::HTTP_2;
        if http2 {
            self.http2.store(true, Relaxed);
        }
        Busy {
            activity: self.clone(),
            http2,
            window_wait: None,
        }
    }

    pub(super) fn check(&self, now: Instant, limits: &Limits) -> Verdict {
        let now_ms = self.ms(now);
        let blocked_ms = self.blocked_ms.load(Relaxed);
        if blocked_ms != 0 && now_ms.saturating_sub(blocked_ms) > limits.send.as_millis() as u64 {
            return Verdict::NotReading;
        }
        if self.is_window_closed(now_ms, limits) {
            return Verdict::NotReading;
        }
        if self.requests.load(Relaxed) > 0 {
            return Verdict::Fine;
        }
        let waited = Duration::from_millis(now_ms.saturating_sub(self.since_ms.load(Relaxed)));
        if self.in_head.load(Relaxed) && !self.http2.load(Relaxed) {
            return if waited > limits.head {
                Verdict::SlowHead
            } else {
                Verdict::Fine
            };
        }
        if waited > limits.idle {
            Verdict::Idle
        } else {
            Verdict::Fine
        }
    }

    /// Whether a frame has waited for the client's window for longer than the send time-out. Begins the
    /// next period when it is time.
    fn is_window_closed(&self, now_ms: u64, limits: &Limits) -> bool {
        let began_ms = self.period_began_ms.load(Relaxed);
        if now_ms.saturating_sub(began_ms) <= limits.send.as_millis() as u64 / 2 {
            return false;
        }
        let period = self.period.load(Relaxed).wrapping_add(1);
        self.period_began_ms.store(now_ms, Relaxed);
        self.period.store(period, Relaxed);
        // A frame that has waited since the period before the last two complete ones has waited for longer than the
        // time-out. This period's slot is the next to be reused.
        let oldest = period.wrapping_add(1) as usize % PERIODS;
        self.window_waits[oldest].load(Relaxed) > 0
    }

    fn on_read(&self) {
        if self.requests.load(Relaxed) == 0 && !self.in_head.load(Relaxed) {
            self.since_ms.store(self.ms(observe::now()), Relaxed);
            self.in_head.store(true, Relaxed);
        }
    }

    fn on_write(&self, blocked: bool) {
        match (blocked, self.blocked_ms.load(Relaxed)) {
            (true, 0) => self
                .blocked_ms
                .store(self.ms(observe::now()).max(1), Relaxed),
            (false, since) if since != 0 => self.blocked_ms.store(0, Relaxed),
            _ => {}
        }
    }

    fn ms(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.opened).as_millis() as u64
    }
}

impl Busy {
    /// hyper took a frame of the response body. Over HTTP/1 the socket itself shows whether the client reads.
    pub(super) fn on_frame(&mut self) {
        if self.http2 && self.window_wait.is_none() {
            let period = self.activity.period.load(Relaxed) as usize % PERIODS;
            self.activity.window_waits[period].fetch_add(1, Relaxed);
            self.window_wait = Some(period);
        }
    }

    /// hyper asks for the next frame, so it has sent the last one.
    pub(super) fn on_poll(&mut self) {
        if let Some(period) = self.window_wait.take() {
            self.activity.window_waits[period].fetch_sub(1, Relaxed);
        }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.on_poll();
        let activity = &self.activity;
        if activity.requests.fetch_sub(1, Relaxed) == 1 {
            activity
                .since_ms
                .store(activity.ms(observe::now()), Relaxed);
        }
    }
}

/// A socket that records its reads and writes.
#[derive(Debug)]
pub(super) struct Watched {
    socket: TcpStream,
    /// Bytes that were read from the socket before it was wrapped; reads return them first.
    early: Bytes,
    activity: Arc<Activity>,
}

impl Watched {
    pub(super) fn new(socket: TcpStream, early: Bytes, activity: Arc<Activity>) -> Self {
        Self {
            socket,
            early,
            activity,
        }
    }
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.early.is_empty() {
            let mut early = mem::take(&mut self.early);
            buffer.put_slice(&early.split_to(early.len().min(buffer.remaining())));
            self.early = early;
            self.activity.on_read();
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.socket).poll_read(cx, buffer);
        if buffer.filled().len() > before {
            self.activity.on_read();
        }
        read
    }
}

impl AsyncWrite for Watched {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write(cx, bytes);
        self.activity.on_write(written.is_pending());
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write_vectored(cx, slices);
        self.activity.on_write(written.is_pending());
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
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
    fn a_request_head_that_has_begun_must_end_within_its_own_timeout() {
        let activity = Activity::new(observe::now());
        activity.on_read();
        assert_eq!(after(&activity, 9), Verdict::Fine);
        assert_eq!(after(&activity, 12), Verdict::SlowHead);
    }

    #[test]
    fn a_running_request_is_never_idle() {
        let activity = Arc::new(Activity::new(observe::now()));
        activity.on_read();
        let busy = activity.begin(Version::HTTP_11);
        assert_eq!(after(&activity, 3600), Verdict::Fine);
        drop(busy);
        assert_eq!(after(&activity, 3600), Verdict::Idle);
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
    fn a_frame_that_the_clients_window_never_admits_ends_the_connection() {
        let activity = Arc::new(Activity::new(observe::now()));
        let mut busy = activity.begin(Version::HTTP_2);
        busy.on_frame();
        let verdicts: Vec<Verdict> = (1..5).map(|look| after(&activity, 16 * look)).collect();
        assert_eq!(verdicts[..2], [Verdict::Fine; 2]);
        assert_eq!(verdicts[2], Verdict::NotReading);
    }

    #[test]
    fn a_body_that_is_polled_again_or_dropped_is_not_waiting() {
        let activity = Arc::new(Activity::new(observe::now()));
        let mut busy = activity.begin(Version::HTTP_2);
        for look in 1..20 {
            busy.on_poll();
            busy.on_frame();
            assert_eq!(after(&activity, 16 * look), Verdict::Fine);
        }
        let other = activity.begin(Version::HTTP_2);
        drop(busy);
        for look in 20..40 {
            assert_eq!(after(&activity, 16 * look), Verdict::Fine);
        }
        drop(other);
    }

    #[test]
    fn over_http1_only_the_socket_shows_whether_the_client_reads() {
        let activity = Arc::new(Activity::new(observe::now()));
        let mut busy = activity.begin(Version::HTTP_11);
        busy.on_frame();
        for look in 1..20 {
            assert_eq!(after(&activity, 16 * look), Verdict::Fine);
        }
    }
}
