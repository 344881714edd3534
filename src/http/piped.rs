//! A body whose pieces come over a channel: from a gateway that carries the bytes, instead of from a connection of this
//! process.

use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::sync::mpsc;

/// The receiving end. The body has ended when the sender is dropped; whoever breaks a body off drops its reader, too.
#[derive(Debug)]
pub struct Piped(mpsc::Receiver<Bytes>);

/// A body, and where its pieces go; at most `capacity` of them wait.
pub fn pipe(capacity: usize) -> (mpsc::Sender<Bytes>, Piped) {
    let (sender, receiver) = mpsc::channel(capacity);
    (sender, Piped(receiver))
}

impl Piped {
    pub fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        self.0.poll_recv(cx)
    }

    pub fn is_end(&self) -> bool {
        self.0.is_closed() && self.0.is_empty()
    }
}
