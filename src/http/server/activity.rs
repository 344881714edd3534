//! What one connection is doing, seen from its reads and writes, and whether that takes too long.
//!
//! A connection notes only changes (first byte of a head, a request begun or ended, a blocked
//! write) and one timer looks at the notes now and then. A timer for each request would cost more.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use hyper::Version;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::Settings;
use crate::observe;

/// How long a connection may do each of these.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    head: Duration,
    idle: Duration,
    send: Duration,
}

impl From<&Settings> for Limits {
    fn from(settings: &Settings) -> Self {
        Self {
            head: Duration::from_millis(settings.header_timeout_ms),
            idle: Duration::from_millis(settings.idle_timeout_ms),
            send: Duration::from_millis(settings.send_timeout_ms),
        }
    }
}

impl Limits {
    /// Often enough to keep each limit within half of itself.
    pub(super) fn look_every(&self) -> Duration {
        (self.head.min(self.idle).min(self.send) / 2).max(Duration::from_millis(10))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Fine,
    Idle,
    SlowHead,
    NotReading,
}

#[derive(Debug)]
pub(super) struct Activity {
    born: Instant,
    requests: AtomicU32,
    /// Bytes of a next request have come, but not its whole head.
    in_head: AtomicBool,
    http2: AtomicBool,
    /// When the connection became idle, or the head's first byte came. Milliseconds since birth.
    since_ms: AtomicU64,
    /// When a write first found no room; 0 when writes succeed.
    blocked_ms: AtomicU64,
    /// Half a send limit each; `judge` counts them on.
    period: AtomicU32,
    period_ms: AtomicU64,
    /// HTTP/2 bodies of which a piece waits for the client's window, by the period in which it came.
    /// The socket is writable all the while.
    withheld: [AtomicU32; PERIODS],
}

const PERIODS: usize = 4;

/// Marks a request as running until it is dropped.
pub(super) struct Busy {
    activity: Arc<Activity>,
    http2: bool,
    /// The period in which a piece was taken, until the next one is asked for.
    withheld: Option<usize>,
}

impl Activity {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            born: now,
            requests: AtomicU32::new(0),
            in_head: AtomicBool::new(false),
            http2: AtomicBool::new(false),
            since_ms: AtomicU64::new(0),
            blocked_ms: AtomicU64::new(0),
            period: AtomicU32::new(0),
            period_ms: AtomicU64::new(0),
            withheld: Default::default(),
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
            withheld: None,
        }
    }

    pub(super) fn judge(&self, now: Instant, limits: &Limits) -> Verdict {
        let now_ms = self.ms(now);
        let blocked_ms = self.blocked_ms.load(Relaxed);
        if blocked_ms != 0 && now_ms.saturating_sub(blocked_ms) > limits.send.as_millis() as u64 {
            return Verdict::NotReading;
        }
        if self.withholds(now_ms, limits) {
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

    /// Whether a piece has waited for longer than the send limit. Counts the periods on.
    fn withholds(&self, now_ms: u64, limits: &Limits) -> bool {
        let begun_ms = self.period_ms.load(Relaxed);
        if now_ms.saturating_sub(begun_ms) <= limits.send.as_millis() as u64 / 2 {
            return false;
        }
        let period = self.period.load(Relaxed).wrapping_add(1);
        self.period_ms.store(now_ms, Relaxed);
        self.period.store(period, Relaxed);
        // Of the period before the last two whole ones, whose slot is the next to be used again.
        let oldest = period.wrapping_add(1) as usize % PERIODS;
        self.withheld[oldest].load(Relaxed) > 0
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
        now.saturating_duration_since(self.born).as_millis() as u64
    }
}

impl Busy {
    /// The body gave a piece. Over HTTP/1 the socket itself shows whether it is taken.
    pub(super) fn on_piece(&mut self) {
        if self.http2 && self.withheld.is_none() {
            let period = self.activity.period.load(Relaxed) as usize % PERIODS;
            self.activity.withheld[period].fetch_add(1, Relaxed);
            self.withheld = Some(period);
        }
    }

    /// The next piece is asked for: the last one has gone.
    pub(super) fn on_poll(&mut self) {
        if let Some(period) = self.withheld.take() {
            self.activity.withheld[period].fetch_sub(1, Relaxed);
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

/// A socket that notes its reads and writes.
#[derive(Debug)]
pub(super) struct Watched {
    socket: TcpStream,
    activity: Arc<Activity>,
}

impl Watched {
    pub(super) fn new(socket: TcpStream, activity: Arc<Activity>) -> Self {
        Self { socket, activity }
    }
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
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

    fn at(activity: &Activity, seconds: u64) -> Verdict {
        activity.judge(activity.born + Duration::from_secs(seconds), &LIMITS)
    }

    #[test]
    fn a_connection_without_a_request_is_idle_after_the_limit() {
        let activity = Activity::new(observe::now());
        assert_eq!(at(&activity, 60), Verdict::Fine);
        assert_eq!(at(&activity, 61), Verdict::Idle);
    }

    #[test]
    fn a_head_that_has_begun_must_end_sooner() {
        let activity = Activity::new(observe::now());
        activity.on_read();
        assert_eq!(at(&activity, 9), Verdict::Fine);
        assert_eq!(at(&activity, 12), Verdict::SlowHead);
    }

    #[test]
    fn a_running_request_is_never_idle() {
        let activity = Arc::new(Activity::new(observe::now()));
        activity.on_read();
        let busy = activity.begin(Version::HTTP_11);
        assert_eq!(at(&activity, 3600), Verdict::Fine);
        drop(busy);
        assert_eq!(at(&activity, 3600), Verdict::Idle);
    }

    #[test]
    fn a_client_that_takes_nothing_is_cut_off_even_while_busy() {
        let activity = Arc::new(Activity::new(observe::now()));
        let busy = activity.begin(Version::HTTP_11);
        activity.on_write(true);
        assert_eq!(at(&activity, 29), Verdict::Fine);
        assert_eq!(at(&activity, 32), Verdict::NotReading);
        activity.on_write(false);
        assert_eq!(at(&activity, 32), Verdict::Fine);
        drop(busy);
    }

    #[test]
    fn a_piece_that_no_window_lets_go_ends_the_connection() {
        let activity = Arc::new(Activity::new(observe::now()));
        let mut busy = activity.begin(Version::HTTP_2);
        busy.on_piece();
        let verdicts: Vec<Verdict> = (1..5).map(|look| at(&activity, 16 * look)).collect();
        assert_eq!(verdicts[..2], [Verdict::Fine; 2]);
        assert_eq!(verdicts[2], Verdict::NotReading);
    }

    #[test]
    fn a_body_that_is_asked_for_more_or_dropped_withholds_nothing() {
        let activity = Arc::new(Activity::new(observe::now()));
        let mut busy = activity.begin(Version::HTTP_2);
        for look in 1..20 {
            busy.on_poll();
            busy.on_piece();
            assert_eq!(at(&activity, 16 * look), Verdict::Fine);
        }
        let other = activity.begin(Version::HTTP_2);
        drop(busy);
        for look in 20..40 {
            assert_eq!(at(&activity, 16 * look), Verdict::Fine);
        }
        drop(other);
    }

    #[test]
    fn over_http1_only_the_socket_tells() {
        let activity = Arc::new(Activity::new(observe::now()));
        let mut busy = activity.begin(Version::HTTP_11);
        busy.on_piece();
        for look in 1..20 {
            assert_eq!(at(&activity, 16 * look), Verdict::Fine);
        }
    }
}
