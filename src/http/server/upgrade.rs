//! An HTTP/1.1 connection that becomes one of another protocol (RFC 9110, section 7.8): after the response of 101 the
//! handler's task has the socket.

use std::fmt;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::http::tls::{Socket, write_to};

type NewOwner = Box<dyn FnOnce(Upgraded) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send>;

/// Among the extensions of a request that asks for an upgrade: what will have its connection.
#[derive(Clone, Default)]
pub struct Upgrade(Arc<Mutex<Option<NewOwner>>>);

impl fmt::Debug for Upgrade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Upgrade")
    }
}

impl Upgrade {
    /// Once the response has been sent, which must be 101, `owner` has the connection, on its I/O thread. The drain waits
    /// for it.
    pub fn hand_over<F>(&self, owner: impl FnOnce(Upgraded) -> F + Send + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        *self.0.lock() = Some(Box::new(|upgraded| Box::pin(owner(upgraded))));
    }

    pub(super) fn take(&self) -> Option<NewOwner> {
        self.0.lock().take()
    }
}

/// After so many bytes in one go the reader has to look at what it has read: whoever sends fast would fill its memory
/// meanwhile.
const READ_AT_ONCE: u64 = 256 << 10;

/// A connection that no longer speaks HTTP.
#[derive(Debug)]
pub struct Upgraded {
    socket: Socket,
    /// What came behind the request's head.
    early: Bytes,
    /// Bytes that were read of it, ever.
    pub bytes_read: u64,
    /// Bytes that were read of it since the reader was last told to wait.
    read_at_once: u64,
    /// How long the other end may leave bytes unread.
    pub send_timeout: Duration,
}

impl Upgraded {
    pub(super) fn new(socket: Socket, early: Bytes, send_timeout: Duration) -> Self {
        let mut upgraded = Self {
            socket,
            early,
            bytes_read: 0,
            read_at_once: 0,
            send_timeout,
        };
        upgraded.let_go();
        upgraded
    }

    /// An empty slice would keep the buffer that it is of.
    fn let_go(&mut self) {
        if self.early.is_empty() {
            self.early = Bytes::new();
        }
    }
}

impl AsyncRead for Upgraded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.early.is_empty() {
            let length = self.early.len().min(buffer.remaining());
            buffer.put_slice(&self.early.split_to(length));
            self.let_go();
            self.bytes_read += length as u64;
            return Poll::Ready(Ok(()));
        }
        if self.read_at_once >= READ_AT_ONCE {
            self.read_at_once = 0;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.socket).poll_read(cx, buffer);
        let bytes = (buffer.filled().len() - before) as u64;
        self.bytes_read += bytes;
        self.read_at_once = if read.is_pending() {
            0
        } else {
            self.read_at_once + bytes
        };
        read
    }
}

write_to!(Upgraded, socket);
