//! The bodies of one connection's requests and responses, which record in its activity what they wait for.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::sync::mpsc;

use super::activity::{Activity, Busy, StreamWatch};
use super::window::{Unread, Window};

/// A request's body. The connection is between two requests only once this has come to its end.
#[derive(Debug)]
pub struct RequestBody {
    source: Source,
    /// None once the end has come, and over HTTP/2.
    unread: Option<Arc<Activity>>,
    /// That of an HTTP/2 request, until the end has come.
    stream: Option<Arc<StreamWatch>>,
    /// What nobody wants of it may be read all the same, so that the connection can be used again.
    is_discardable: bool,
    /// That of its connection over HTTP/2.
    window: Option<Arc<Window>>,
}

#[derive(Debug)]
enum Source {
    Connection(Incoming),
    /// It has ended when the sender is dropped; whoever breaks it off drops its reader, too.
    Piped(mpsc::Receiver<Bytes>),
    Over,
}

impl From<mpsc::Receiver<Bytes>> for RequestBody {
    /// The body of a request that came in another way than over a connection of its own.
    fn from(pieces: mpsc::Receiver<Bytes>) -> Self {
        Self {
            source: Source::Piped(pieces),
            unread: None,
            stream: None,
            is_discardable: false,
            window: None,
        }
    }
}

impl RequestBody {
    /// `is_promised`: the client sends it only once somebody reads (`Expect: 100-continue`).
    pub(super) fn new(
        incoming: Incoming,
        activity: &Arc<Activity>,
        stream: Option<&Arc<StreamWatch>>,
        window: &Arc<Window>,
        is_promised: bool,
    ) -> Self {
        let has_more = !incoming.is_end_stream();
        let is_http1 = stream.is_none();
        if has_more && is_http1 {
            activity.begin_body();
        }
        Self {
            source: Source::Connection(incoming),
            unread: (has_more && is_http1).then(|| activity.clone()),
            stream: stream.filter(|_| has_more).cloned(),
            is_discardable: !is_promised,
            window: stream.map(|_| window.clone()),
        }
    }

    /// Whoever does not read on for a while keeps this meanwhile. `None`: bodies that are not read hold so much of the
    /// connection's window that uploads of others would stand still. `has_memory`: what was read of it has memory that
    /// counts for its owner.
    pub fn leave_unread(&self, has_memory: bool) -> Option<Unread> {
        let Some(window) = &self.window else {
            return Some(Unread::default());
        };
        // One without a length may have come to its end, too.
        let rest = if self.is_end_stream() {
            Some(0)
        } else {
            self.size_hint().upper()
        };
        window.hold(rest, has_memory)
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        if let Some(stream) = &self.stream {
            stream.leave_body_unread();
        }
        let Some(activity) = self.unread.take() else {
            return;
        };
        let rest = match std::mem::replace(&mut self.source, Source::Over) {
            Source::Connection(incoming) if self.is_discardable => Some(incoming),
            _ => None,
        };
        activity.leave_body_unread(rest);
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let incoming = match &mut self.source {
            Source::Connection(incoming) => incoming,
            Source::Piped(pieces) => {
                let piece = pieces.poll_recv(cx);
                return piece.map(|data| data.map(Frame::data).map(Ok));
            }
            Source::Over => return Poll::Ready(None),
        };
        let polled = Pin::new(&mut *incoming).poll_frame(cx);
        let is_end = match &polled {
            Poll::Ready(Some(Ok(_))) => incoming.is_end_stream(),
            Poll::Ready(None) => true,
            Poll::Ready(Some(Err(_))) => {
                // hyper closes the connection.
                self.is_discardable = false;
                false
            }
            Poll::Pending => false,
        };
        if is_end {
            self.stream = None;
            if let Some(activity) = self.unread.take() {
                activity.end_body();
            }
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            Source::Connection(incoming) => incoming.is_end_stream(),
            Source::Piped(pieces) => pieces.is_closed() && pieces.is_empty(),
            Source::Over => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Connection(incoming) => incoming.size_hint(),
            Source::Piped(_) | Source::Over => SizeHint::default(),
        }
    }
}

/// Over HTTP/2 a longer frame goes to hyper in pieces of this size, each of which waits until the client's window has
/// taken those before it: only so does it show whether the client reads, and the request runs for as long as it does.
/// Half of a stream's window by default, which is 65,535 bytes, so that a piece fits into what a client grants.
const PIECE_BYTES: usize = 32 << 10;

/// A response body that keeps its connection busy until it has been sent or dropped.
#[derive(Debug)]
pub(super) struct BusyBody<B> {
    /// None once it has ended on a stream that stays open: what it holds is free, and its line is logged.
    body: Option<B>,
    /// What is left of a long frame.
    rest: Bytes,
    busy: Busy,
}

impl<B> BusyBody<B> {
    pub(super) fn new(body: B, busy: Busy) -> Self {
        Self {
            body: Some(body),
            rest: Bytes::new(),
            busy,
        }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for BusyBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        self.busy.on_poll();
        if self.busy.must_wait(cx) {
            return Poll::Pending;
        }
        let mut polled = if !self.rest.is_empty() {
            let length = self.rest.len().min(PIECE_BYTES);
            Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(length)))))
        } else if let Some(body) = &mut self.body {
            Pin::new(body).poll_frame(cx)
        } else {
            Poll::Ready(None)
        };
        if let Poll::Ready(Some(Ok(frame))) = &mut polled {
            self.busy.on_frame();
            if self.busy.is_http2()
                && let Some(data) = frame.data_mut()
                && data.len() > PIECE_BYTES
            {
                self.rest = data.split_off(PIECE_BYTES);
            }
        }
        if self.busy.has_unread_body() {
            let is_over = match &polled {
                Poll::Ready(Some(Ok(_))) => self.is_end_stream(),
                Poll::Ready(None) => true,
                Poll::Ready(Some(Err(_))) | Poll::Pending => false,
            };
            if is_over && self.busy.leave_open() {
                self.body = None;
            }
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.as_ref().is_none_or(B::is_end_stream)
    }

    /// hyper asks before the first frame, when nothing is left of one.
    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map(B::size_hint).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use http_body_util::Full;
    use hyper::Version;

    use super::*;
    use crate::http::server::window::STREAM_WINDOW_BYTES;
    use crate::observe;

    /// The lengths of the frames that hyper gets of a body of one frame.
    fn frames(version: Version, length: usize) -> Vec<usize> {
        let activity = Arc::new(Activity::new(observe::now()));
        let body = Full::new(Bytes::from(vec![b'x'; length]));
        let mut body = BusyBody::new(body, activity.begin(version));
        let cx = &mut Context::from_waker(Waker::noop());
        let mut lengths = Vec::new();
        while !body.is_end_stream() {
            match Pin::new(&mut body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => lengths.push(frame.into_data().unwrap().len()),
                _ => panic!("no frame before the end"),
            }
        }
        lengths
    }

    #[test]
    fn the_stream_of_a_body_that_was_not_read_stays_open_without_its_response() {
        let activity = Arc::new(Activity::new(observe::now()));
        let cx = &mut Context::from_waker(Waker::noop());
        for is_unread in [false, true] {
            let busy = activity.begin(Version::HTTP_2);
            let mut request = RequestBody::from(mpsc::channel::<Bytes>(1).1);
            request.stream = busy.stream().filter(|_| is_unread).cloned();
            drop(request);
            let mut body = BusyBody::new(Full::new(Bytes::from_static(b"x")), busy);
            assert!(Pin::new(&mut body).poll_frame(cx).is_ready());
            assert_eq!(body.body.is_none(), is_unread);
            assert!(body.is_end_stream());
        }
    }

    #[test]
    fn a_body_without_a_length_that_has_come_holds_nothing_of_the_window() {
        let (sender, pieces) = mpsc::channel::<Bytes>(1);
        let mut body = RequestBody::from(pieces);
        body.window = Some(Window::new(4 * STREAM_WINDOW_BYTES));
        let _held = body.leave_unread(false).unwrap();
        assert!(body.leave_unread(false).is_none());
        drop(sender);
        assert!(body.leave_unread(false).is_some());
    }

    #[test]
    fn a_long_frame_goes_out_in_pieces_over_http2() {
        for (length, expected) in [
            (1, vec![1]),
            (PIECE_BYTES, vec![PIECE_BYTES]),
            (PIECE_BYTES + 1, vec![PIECE_BYTES, 1]),
            (3 * PIECE_BYTES, vec![PIECE_BYTES; 3]),
        ] {
            assert_eq!(frames(Version::HTTP_2, length), expected, "{length}");
            assert_eq!(frames(Version::HTTP_11, length), [length]);
        }
    }
}
