//! A client's socket, which records reads and writes in its connection's activity, sends another response where hyper would
//! send an empty one, and notices a client that leaves with bytes behind its request.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use prometheus::IntCounterVec;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::activity::Activity;
use super::malformed::{OnMalformed, automatic_status};
use super::metrics::Metrics;
use crate::http::tls::Socket;

#[derive(Debug)]
pub(super) struct Watched {
    socket: Socket,
    /// Bytes that were read from the socket before hyper asked for them; its reads return them first.
    early: Bytes,
    /// hyper has asked for bytes and waits for them, so it finds the end of the connection by itself.
    is_reading: bool,
    activity: Arc<Activity>,
    on_malformed: Option<OnMalformed>,
    replacement: Option<Replacement>,
    closed: IntCounterVec,
}

/// What a client may send behind the HTTP/1 request that runs: requests that it does not wait with. It must be read, since
/// the end of the connection comes behind it. As much as hyper itself reads.
const MAX_BEHIND_BYTES: usize = 64 << 10;

/// A response that is being sent in place of hyper's.
#[derive(Debug)]
struct Replacement {
    left: Bytes,
    /// The length of hyper's response, which counts as written once nothing is left.
    replaced_bytes: usize,
}

impl Watched {
    pub(super) fn new(
        socket: Socket,
        early: Bytes,
        activity: Arc<Activity>,
        on_malformed: Option<OnMalformed>,
        metrics: &Metrics,
    ) -> Self {
        Self {
            socket,
            early,
            is_reading: false,
            closed: metrics.closed.clone(),
            activity,
            on_malformed,
            replacement: None,
        }
    }

    /// The socket, and the early bytes that were not read.
    pub(super) fn into_parts(self) -> (Socket, Bytes) {
        (self.socket, self.early)
    }

    /// Reads on while a request runs and hyper does not: that has bytes of the next request and leaves the rest to the socket,
    /// and would not notice that the client leaves. An error ends the connection, and the request with it.
    fn look_ahead(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if self.is_reading || !self.activity.is_behind_request() {
            return Ok(());
        }
        let mut bytes = [MaybeUninit::uninit(); 4 << 10];
        while self.early.len() <= MAX_BEHIND_BYTES {
            let mut buffer = ReadBuf::uninit(&mut bytes);
            match Pin::new(&mut self.socket).poll_read(cx, &mut buffer) {
                Poll::Pending => return Ok(()),
                Poll::Ready(read) => read?,
            }
            if buffer.filled().is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.early = [&self.early, buffer.filled()].concat().into();
        }
        if self.activity.has_unread_body() {
            // It is the rest of that body, and the connection ends with the response.
            return Ok(());
        }
        self.closed.with_label_values(&["pipelined"]).inc();
        Err(io::Error::other("too many bytes behind a request"))
    }

    /// Begins to replace what hyper is about to write, if that is hyper's own response to a malformed head. While a
    /// request runs, or is answered, it is not.
    fn replace(&mut self, bytes: &[u8]) {
        if self.replacement.is_some() || self.activity.has_requests() {
            return;
        }
        let on_malformed = self.on_malformed.as_ref();
        let replaced = on_malformed.and_then(|on| Some((on, automatic_status(bytes)?)));
        self.replacement = replaced.map(|(on_malformed, status)| Replacement {
            left: on_malformed.response(status),
            replaced_bytes: bytes.len(),
        });
    }

    fn poll_replacement(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<usize>>> {
        let Some(replacement) = &mut self.replacement else {
            return Poll::Ready(None);
        };
        while !replacement.left.is_empty() {
            match ready!(Pin::new(&mut self.socket).poll_write(cx, &replacement.left)) {
                Ok(written) => replacement.left.advance(written),
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
        }
        let written = replacement.replaced_bytes;
        self.replacement = None;
        Poll::Ready(Some(Ok(written)))
    }
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.early.is_empty() {
            self.is_reading = false;
            let length = self.early.len().min(buffer.remaining());
            buffer.put_slice(&self.early.split_to(length));
            if self.early.is_empty() {
                // Also read what follows: hyper would take the short first read for a partial head, and allocate again. If
                // this fails, the next read fails or finds the end.
                let _ = Pin::new(&mut self.socket).poll_read(cx, buffer);
            }
            self.activity.on_read(buffer.filled());
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.socket).poll_read(cx, buffer);
        self.is_reading = read.is_pending();
        if buffer.filled().len() > before {
            self.activity.on_read(&buffer.filled()[before..]);
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
        self.replace(bytes);
        let written = match self.poll_replacement(cx) {
            Poll::Ready(None) => Pin::new(&mut self.socket).poll_write(cx, bytes),
            Poll::Ready(Some(written)) => Poll::Ready(written),
            Poll::Pending => Poll::Pending,
        };
        self.activity.on_write(written.is_pending());
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let [bytes] = slices {
            return self.poll_write(cx, bytes);
        }
        let written = Pin::new(&mut self.socket).poll_write_vectored(cx, slices);
        self.activity.on_write(written.is_pending());
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    /// hyper also calls this each time that it has nothing to write.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.look_ahead(cx)?;
        let flushed = Pin::new(&mut self.socket).poll_flush(cx);
        // What was written with TLS waits for the socket here.
        if self.socket.is_tls() {
            self.activity.on_write(flushed.is_pending());
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}
