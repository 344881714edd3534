//! The body of an upload as a stream of pieces, within its bounds of size and time.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_core::Stream;
use http_body::Body;
use tokio::time::Sleep;

use crate::http::server::RequestBody;
use crate::observe;
use crate::openai::error::ApiError;

/// Bytes that come in a second at least, on an average of the time that the client was waited for: slower than any
/// connection that files are sent over. A file of 1 GiB takes 18 hours at the most.
const LEAST_RATE: u64 = 16 << 10;

/// Bytes of a form that are not of its file: headers of parts, other fields, what stands before the first part. The
/// reader of the form has these in memory.
pub(super) const MAX_HEAD_BYTES: u64 = 64 << 10;

#[derive(Clone, Copy, Debug)]
pub(super) struct UploadLimits {
    /// Bytes of the file.
    pub(super) max: u64,
    /// The time within which a piece must come.
    pub(super) timeout: Duration,
}

impl UploadLimits {
    /// What a client gets that sends too slowly.
    pub(super) fn too_slow(self) -> ApiError {
        let least = LEAST_RATE.saturating_mul(self.timeout.as_secs()).max(1);
        ApiError::slow_body(least, self.timeout)
    }
}

/// Why there are no more pieces.
#[derive(Debug, thiserror::Error)]
pub(super) enum PieceError {
    #[error("{0}")]
    Broken(hyper::Error),
    #[error("the client sends too slowly")]
    Slow,
    #[error("its headers and fields are longer than {max} bytes", max = MAX_HEAD_BYTES)]
    LongHead,
    #[error("the file is too large")]
    TooLarge,
}

/// Bytes that came since the reader of the form found a part or returned bytes of one, when it sets them back. So
/// headers without an end do not fill the memory.
#[derive(Clone, Debug, Default)]
pub(super) struct HeadBytes(Arc<AtomicU64>);

impl HeadBytes {
    pub(super) fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    fn add(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }

    fn is_over(&self) -> bool {
        self.0.load(Ordering::Relaxed) > MAX_HEAD_BYTES
    }
}

#[derive(Debug)]
pub(super) struct UploadPieces {
    body: RequestBody,
    max_bytes: u64,
    bytes: u64,
    pace: UploadPace,
    timer: Option<Pin<Box<Sleep>>>,
    head: HeadBytes,
    /// The last poll returned a piece.
    has_given: bool,
}

impl UploadPieces {
    pub(super) fn new(body: RequestBody, limits: UploadLimits, head: HeadBytes) -> Self {
        Self {
            body,
            max_bytes: limits.max.saturating_add(MAX_HEAD_BYTES),
            bytes: 0,
            pace: UploadPace::new(limits.timeout),
            timer: None,
            head,
            has_given: false,
        }
    }

    fn on_data(&mut self, data: Bytes) -> Result<Bytes, PieceError> {
        let length = data.len() as u64;
        self.timer = None;
        self.pace.on_data(observe::now(), length);
        self.head.add(length);
        self.bytes += length;
        if self.bytes > self.max_bytes {
            return Err(PieceError::TooLarge);
        }
        self.has_given = true;
        Ok(data)
    }

    fn poll_timer(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, PieceError>>> {
        let pace = &mut self.pace;
        let timer = self.timer.get_or_insert_with(|| {
            let deadline = pace.deadline(observe::now());
            Box::pin(tokio::time::sleep_until(deadline.into()))
        });
        timer
            .as_mut()
            .poll(cx)
            .map(|()| Some(Err(PieceError::Slow)))
    }
}

impl Stream for UploadPieces {
    type Item = Result<Bytes, PieceError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if std::mem::take(&mut this.has_given) {
            // The reader of the form takes all that it can get before it looks at any of it. It gets one piece at a
            // time.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if this.head.is_over() {
            return Poll::Ready(Some(Err(PieceError::LongHead)));
        }
        loop {
            let frame = match Pin::new(&mut this.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => frame,
                Poll::Ready(Some(Err(error))) => {
                    return Poll::Ready(Some(Err(PieceError::Broken(error))));
                }
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => return this.poll_timer(cx),
            };
            if let Ok(data) = frame.into_data()
                && !data.is_empty()
            {
                return Poll::Ready(Some(this.on_data(data)));
            }
        }
    }
}

/// Whether a client sends fast enough. Only the time counts in which it was waited for, not that in which storage was.
/// Pure.
#[derive(Debug)]
struct UploadPace {
    limit: Duration,
    bytes: u64,
    waited: Duration,
    waits_since: Option<Instant>,
}

impl UploadPace {
    fn new(limit: Duration) -> Self {
        Self {
            limit,
            bytes: 0,
            waited: Duration::ZERO,
            waits_since: None,
        }
    }

    /// Until when the next piece may be waited for.
    fn deadline(&mut self, now: Instant) -> Instant {
        let since = *self.waits_since.get_or_insert(now);
        let earned = Duration::from_millis(self.bytes.saturating_mul(1_000) / LEAST_RATE);
        let left = (self.limit + earned).saturating_sub(self.waited);
        since + left.min(self.limit)
    }

    fn on_data(&mut self, now: Instant, bytes: u64) {
        if let Some(since) = self.waits_since.take() {
            self.waited += now.saturating_duration_since(since);
        }
        self.bytes += bytes;
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use tokio::sync::mpsc;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    #[test]
    fn the_reader_of_the_form_gets_one_piece_at_a_time() {
        let (sender, piped) = mpsc::channel(3);
        for piece in ["a", "b", "c"] {
            sender
                .try_send(Bytes::from_static(piece.as_bytes()))
                .unwrap();
        }
        drop(sender);
        let limits = UploadLimits {
            max: 10,
            timeout: LIMIT,
        };
        let mut pieces = UploadPieces::new(piped.into(), limits, HeadBytes::default());
        let mut poll = || {
            let mut cx = Context::from_waker(Waker::noop());
            Pin::new(&mut pieces).poll_next(&mut cx)
        };
        for expected in ["a", "b", "c"] {
            let polled = poll();
            let Poll::Ready(Some(Ok(piece))) = polled else {
                panic!("{polled:?}");
            };
            assert_eq!(piece, expected);
            assert!(poll().is_pending());
        }
        assert!(matches!(poll(), Poll::Ready(None)));
    }

    #[test]
    fn headers_without_an_end_are_refused() {
        let (sender, piped) = mpsc::channel(3);
        let head = HeadBytes::default();
        let limits = UploadLimits {
            max: 1 << 30,
            timeout: LIMIT,
        };
        let mut pieces = UploadPieces::new(piped.into(), limits, head.clone());
        let mut poll = || {
            let long = Bytes::from(vec![b'x'; MAX_HEAD_BYTES as usize + 1]);
            sender.try_send(long).unwrap();
            let mut cx = Context::from_waker(Waker::noop());
            // With the second poll the reader looks at the piece first.
            let polled = Pin::new(&mut pieces).poll_next(&mut cx);
            let _ = Pin::new(&mut pieces).poll_next(&mut cx);
            polled
        };
        assert!(matches!(poll(), Poll::Ready(Some(Ok(_)))));
        head.reset();
        assert!(matches!(poll(), Poll::Ready(Some(Ok(_)))));
        let refused = poll();
        assert!(matches!(
            refused,
            Poll::Ready(Some(Err(PieceError::LongHead)))
        ));
    }

    #[test]
    fn a_steady_client_has_as_long_as_it_takes() {
        let mut now = observe::now();
        let mut pace = UploadPace::new(LIMIT);
        for _ in 0..10_000 {
            assert_eq!(pace.deadline(now), now + LIMIT);
            now += Duration::from_secs(1);
            pace.on_data(now, LEAST_RATE);
        }
    }

    #[test]
    fn a_byte_now_and_then_does_not_keep_an_upload_open() {
        let mut now = observe::now();
        let mut pace = UploadPace::new(LIMIT);
        for seconds in [10, 10, 9] {
            assert!(pace.deadline(now) > now + Duration::from_secs(seconds));
            now += Duration::from_secs(seconds);
            pace.on_data(now, 1);
        }
        let left = pace.deadline(now) - now;
        assert!(left <= Duration::from_secs(2), "{left:?}");
    }

    #[test]
    fn the_time_that_storage_takes_is_not_the_clients() {
        let mut now = observe::now();
        let mut pace = UploadPace::new(LIMIT);
        for _ in 0..100 {
            // The piece was there when it was asked for.
            pace.on_data(now, 1);
            now += Duration::from_secs(60);
        }
        assert_eq!(pace.deadline(now), now + LIMIT);
    }
}
