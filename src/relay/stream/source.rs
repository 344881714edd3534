//! Reads an engine's answer: all that is available, as one piece.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::Body;

use super::pieces::{BATCH_BYTES, Batch};
use crate::http::client::EngineBody;

/// One engine's connection.
pub(super) struct Source {
    /// `None` once the answer has ended.
    engine: Option<EngineBody>,
    first: Option<Bytes>,
}

/// What was read.
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
        let mut batch = Batch::default();
        if let Some(first) = self.first.take() {
            batch.push(first);
        }
        while batch.len() < BATCH_BYTES {
            let Some(engine) = &mut self.engine else {
                return Poll::Ready(Read::End(batch.take()));
            };
            // Where the length is known, hyper does not poll for an end that has been reached.
            if engine.is_end_stream() {
                return Poll::Ready(Read::End(batch.take()));
            }
            match Pin::new(engine).poll_frame(cx) {
                // Trailers are dropped.
                Poll::Ready(Some(Ok(frame))) => batch.push(frame.into_data().unwrap_or_default()),
                Poll::Ready(Some(Err(_))) => return Poll::Ready(Read::Broken(batch.take())),
                Poll::Ready(None) => return Poll::Ready(Read::End(batch.take())),
                Poll::Pending if batch.len() == 0 => return Poll::Pending,
                Poll::Pending => break,
            }
        }
        // The client's side may not ask for more than the length that it knows.
        let is_over = self.engine.as_ref().is_none_or(Body::is_end_stream);
        Poll::Ready(if is_over {
            Read::End(batch.take())
        } else {
            Read::Data(batch.take())
        })
    }
}
