//! The body of an engine's answer.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::sync::mpsc;

use super::Pool;
use super::connection::Connection;

/// A response body together with its connection. When the body has been read to its end, the connection
/// goes back to the pool; when it is dropped before, the connection closes.
pub struct EngineBody(Source);

enum Source {
    Connection {
        incoming: Incoming,
        connection: Option<Connection>,
        pool: Arc<Pool>,
    },
    /// A stream of a connection that others share.
    Stream { incoming: Incoming, pool: Arc<Pool> },
    /// A gateway has the connection. The body has ended when the sender is dropped; whoever breaks it off drops its reader,
    /// too.
    Piped(mpsc::Receiver<Bytes>),
}

impl From<mpsc::Receiver<Bytes>> for EngineBody {
    fn from(pieces: mpsc::Receiver<Bytes>) -> Self {
        Self(Source::Piped(pieces))
    }
}

impl fmt::Debug for EngineBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = match &self.0 {
            Source::Connection { pool, .. } | Source::Stream { pool, .. } => pool.address(),
            Source::Piped(_) => "piped",
        };
        f.debug_struct("EngineBody")
            .field("address", &address)
            .finish_non_exhaustive()
    }
}

impl EngineBody {
    pub(super) fn of_connection(
        incoming: Incoming,
        connection: Connection,
        pool: Arc<Pool>,
    ) -> Self {
        let is_over = incoming.is_end_stream();
        let mut connection = Some(connection);
        if is_over {
            give_back(&mut connection, &pool);
        }
        Self(Source::Connection {
            incoming,
            connection,
            pool,
        })
    }

    pub(super) fn of_stream(incoming: Incoming, pool: Arc<Pool>) -> Self {
        Self(Source::Stream { incoming, pool })
    }
}

fn give_back(connection: &mut Option<Connection>, pool: &Pool) {
    if let Some(mut connection) = connection.take()
        && connection.is_over()
    {
        pool.put(connection);
    }
}

impl Body for EngineBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let (incoming, connection, pool) = match &mut self.get_mut().0 {
            Source::Connection {
                incoming,
                connection,
                pool,
            } => (incoming, connection, pool),
            Source::Stream { incoming, .. } => return Pin::new(incoming).poll_frame(cx),
            Source::Piped(pieces) => {
                let piece = pieces.poll_recv(cx);
                return piece.map(|data| data.map(Frame::data).map(Ok));
            }
        };
        let mut next = |quiet: &mut Context<'_>| Pin::new(&mut *incoming).poll_frame(quiet);
        let frame = match connection {
            Some(connection) => connection.poll(cx, &mut next),
            None => next(&mut Context::from_waker(Waker::noop())),
        };
        match &frame {
            Poll::Ready(Some(Ok(_))) if incoming.is_end_stream() => give_back(connection, pool),
            Poll::Ready(None) => give_back(connection, pool),
            Poll::Ready(Some(Err(_))) => *connection = None,
            Poll::Ready(Some(Ok(_))) | Poll::Pending => {}
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Source::Connection { incoming, .. } | Source::Stream { incoming, .. } => {
                incoming.is_end_stream()
            }
            Source::Piped(pieces) => pieces.is_closed() && pieces.is_empty(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Source::Connection { incoming, .. } | Source::Stream { incoming, .. } => {
                incoming.size_hint()
            }
            Source::Piped(_) => SizeHint::default(),
        }
    }
}
