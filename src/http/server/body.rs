//! The bodies of one connection's requests and responses, which record in its activity what they wait for.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

use super::activity::{Activity, Busy};
use crate::http::piped::Piped;

/// A request's body. The connection is between two requests only once this has come to its end.
#[derive(Debug)]
pub struct RequestBody {
    source: Source,
    /// None once the end has come.
    unread: Option<Arc<Activity>>,
}

#[derive(Debug)]
enum Source {
    Connection(Incoming),
    Piped(Piped),
}

impl From<Piped> for RequestBody {
    /// The body of a request that came in another way than over a connection of its own.
    fn from(piped: Piped) -> Self {
        Self {
            source: Source::Piped(piped),
            unread: None,
        }
    }
}

impl RequestBody {
    pub(super) fn new(incoming: Incoming, activity: &Arc<Activity>) -> Self {
        let unread = (!incoming.is_end_stream()).then(|| activity.clone());
        Self {
            source: Source::Connection(incoming),
            unread,
        }
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        if let Some(activity) = self.unread.take() {
            activity.leave_body_unread();
        }
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
            Source::Piped(piped) => {
                return piped
                    .poll_data(cx)
                    .map(|data| data.map(Frame::data).map(Ok));
            }
        };
        let polled = Pin::new(&mut *incoming).poll_frame(cx);
        let is_end = match &polled {
            Poll::Ready(Some(Ok(_))) => incoming.is_end_stream(),
            Poll::Ready(None) => true,
            // After an error hyper closes the connection.
            Poll::Ready(Some(Err(_))) | Poll::Pending => false,
        };
        if is_end {
            self.unread = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            Source::Connection(incoming) => incoming.is_end_stream(),
            Source::Piped(piped) => piped.is_end(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Connection(incoming) => incoming.size_hint(),
            Source::Piped(_) => SizeHint::default(),
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
