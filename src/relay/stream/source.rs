//! Reads an engine's answer: all that is available, as one piece.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::Body;
use smallvec::SmallVec;

use crate::http::client::EngineBody;

/// Pieces that are available at once are passed on as one, up to about this size.
const BATCH_BYTES: usize = 8 << 10;

pub(super) struct Source {
    /// `None` once the answer has ended.
    engine: Option<EngineBody>,
    first: Option<Bytes>,
}

pub(super) enum Read {
    Data(Bytes),
    /// The last data.
    End(Bytes),
    Broken(Bytes),
}

impl Source {
    pub(super) fn new(engine: EngineBody, first: Option<Bytes>) -> Self {
        Self {
            engine: Some(engine),
            first,
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.engine.is_none()
    }

    /// Nothing more is read; the connection is closed.
    pub(super) fn close(&mut self) {
        self.engine = None;
    }

    /// Everything that is available, as one piece: tokens that came together cost one write. Does not wait.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Read> {
        let mut pieces: Pieces = self.first.take().into_iter().collect();
        let mut length: usize = pieces.iter().map(Bytes::len).sum();
        while length < BATCH_BYTES {
            let Some(engine) = &mut self.engine else {
                return Poll::Ready(Read::End(joined(pieces)));
            };
            // Where the length is known, hyper does not poll for an end that has been reached.
            if engine.is_end_stream() {
                return Poll::Ready(Read::End(joined(pieces)));
            }
            match Pin::new(engine).poll_frame(cx) {
                // Trailers and empty pieces are dropped.
                Poll::Ready(Some(Ok(frame))) => {
                    let piece = frame.into_data().ok().filter(|piece| !piece.is_empty());
                    length += piece.as_ref().map_or(0, Bytes::len);
                    pieces.extend(piece);
                }
                Poll::Ready(Some(Err(_))) => return Poll::Ready(Read::Broken(joined(pieces))),
                Poll::Ready(None) => return Poll::Ready(Read::End(joined(pieces))),
                Poll::Pending if length == 0 => return Poll::Pending,
                Poll::Pending => break,
            }
        }
        // The client's side may not ask for more than the length that it knows.
        let is_over = self.engine.as_ref().is_none_or(Body::is_end_stream);
        Poll::Ready(if is_over {
            Read::End(joined(pieces))
        } else {
            Read::Data(joined(pieces))
        })
    }
}

/// More than so many are allocated.
type Pieces = SmallVec<[Bytes; 8]>;

/// All pieces as one. A single one is not copied.
fn joined(mut pieces: Pieces) -> Bytes {
    if pieces.len() > 1 {
        return pieces.concat().into();
    }
    pieces.pop().unwrap_or_default()
}
