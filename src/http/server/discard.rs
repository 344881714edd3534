//! Reads what is left of a request's body that nobody wants, if that is short and has come already.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

use http_body::Body;
use hyper::body::Incoming;

/// A body that nobody wants is read up to this size. For a longer one the connection is closed.
const DISCARDED_BYTES: u64 = 64 << 10;
/// hyper hands a body that it has read already over within so many turns of the task. Nobody waits for one that has not come.
const DISCARD_TURNS: u32 = 4;

/// Reads what is left of a body that nobody wants. True if that was all there at once.
pub(super) async fn discard(mut body: Incoming) -> bool {
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
