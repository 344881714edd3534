//! The bodies of one connection's requests and responses, which record in its activity what they wait for.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::sync::mpsc;

use super::activity::{Activity, Busy};

/// A request's body. The connection is between two requests only once this has come to its end.
#[derive(Debug)]
pub struct RequestBody {
    source: Source,
    /// None once the end has come, and over HTTP/2, whose streams end by themselves.
    unread: Option<Arc<Activity>>,
    /// What nobody wants of it may be read all the same, so that the connection can be used again.
    is_discardable: bool,
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
            is_discardable: false,
        }
    }
}

impl RequestBody {
    /// `is_promised`: the client sends it only once somebody reads (`Expect: 100-continue`).
    pub(super) fn new(incoming: Incoming, activity: &Arc<Activity>, is_promised: bool) -> Self {
        let has_more = !incoming.is_end_stream() && !activity.is_http2();
        if has_more {
            activity.begin_body();
        }
        Self {
            source: Source::Connection(incoming),
            unread: has_more.then(|| activity.clone()),
            is_discardable: !is_promised,
        }
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
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
        if is_end && let Some(activity) = self.unread.take() {
            activity.end_body();
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

/// A response body that keeps its connection busy until it has been sent or dropped.
#[derive(Debug)]
pub(super) struct BusyBody<B> {
    pub(super) body: B,
    pub(super) busy: Busy,
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
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        if let Poll::Ready(Some(Ok(_))) = &polled {
            self.busy.on_frame();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
