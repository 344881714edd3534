//! What one connection is doing, seen from its reads and writes, and whether that takes too long.
//!
//! A connection notes only changes (first byte of a head, a request begun or ended, a blocked
//! write) and one timer looks at the notes now and then. A timer for each request would cost more.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Context;
use std::task::Poll;
use std::time::Duration;
use std::time::Instant;

use hyper::Version;
use tokio::io::AsyncRead;
use tokio::io::AsyncWrite;
use tokio::io::ReadBuf;
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
}

/// Marks a request as running until it is dropped.
pub(super) struct Busy(Arc<Activity>);

impl Activity {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            born: now,
            requests: AtomicU32::new(0),
            in_head: AtomicBool::new(false),
            http2: AtomicBool::new(false),
            since_ms: AtomicU64::new(0),
            blocked_ms: AtomicU64::new(0),
        }
    }

    pub(super) fn begin(self: &Arc<Self>, version: Version) -> Busy {
        self.requests.fetch_add(1, Relaxed);
        self.in_head.store(false, Relaxed);
        if version == Version::HTTP_2 {
            self.http2.store(true, Relaxed);
        }
        Busy(self.clone())
    }

    pub(super) fn judge(&self, now: Instant, limits: &Limits) -> Verdict {
        let now_ms = self.ms(now);
        let blocked_ms = self.blocked_ms.load(Relaxed);
        if blocked_ms != 0 && now_ms.saturating_sub(blocked_ms) > limits.send.as_millis() as u64 {
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
    pub(super) fn is_held(&self) -> bool {
        self.0.requests.load(Relaxed) > 0
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        if self.0.requests.fetch_sub(1, Relaxed) == 1 {
            self.0.since_ms.store(self.0.ms(observe::now()), Relaxed);
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
}
