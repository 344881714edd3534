//! The bodies of one connection's requests and responses, which record in its activity what they wait for.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

use super::activity::{Activity, Busy};

/// A request's body. The connection is between two requests only once this has come to its end.
#[derive(Debug)]
pub struct RequestBody {
    incoming: Incoming,
    /// None once the end has come.
    unread: Option<Arc<Activity>>,
}

impl RequestBody {
    pub(super) fn new(incoming: Incoming, activity: &Arc<Activity>) -> Self {
        let unread = (!incoming.is_end_stream()).then(|| activity.clone());
        Self { incoming, unread }
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
        let polled = Pin::new(&mut self.incoming).poll_frame(cx);
        let is_end = match &polled {
            Poll::Ready(Some(Ok(_))) => self.incoming.is_end_stream(),
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
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
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
