//! One body on its way from the gateway to a reader in this process. While its reader has no room, nothing more is read
//! from the gateway.

use bytes::Bytes;
use tokio::sync::mpsc;

/// Pieces that wait for a reader, each of up to some 64 KB.
const CAPACITY: usize = 4;

#[derive(Debug, Default)]
pub(super) struct Pieces {
    reader: Option<mpsc::Sender<Bytes>>,
    /// A piece that its reader has no room for.
    waiting: Option<Bytes>,
    /// No more will come.
    pub(super) is_over: bool,
}

impl Pieces {
    /// The body for its reader.
    pub(super) fn open(&mut self) -> mpsc::Receiver<Bytes> {
        let (sender, body) = mpsc::channel(CAPACITY);
        self.reader = Some(sender);
        body
    }

    pub(super) fn is_open(&self) -> bool {
        self.reader.is_some() && !self.is_over
    }

    /// Only while no other piece waits.
    pub(super) fn push(&mut self, piece: Bytes) {
        let Some(reader) = &self.reader else {
            return;
        };
        if piece.is_empty() {
            return;
        }
        match reader.try_send(piece) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(piece)) => self.waiting = Some(piece),
            // Its reader has seen enough: what follows is dropped.
            Err(mpsc::error::TrySendError::Closed(_)) => {}
        }
    }

    pub(super) fn end(&mut self) {
        self.is_over = true;
        if self.waiting.is_none() {
            self.reader = None;
        }
    }

    pub(super) fn has_waiting(&self) -> bool {
        self.waiting.is_some()
    }

    /// Waits for room for the piece that waits. Nothing is lost if this is dropped.
    pub(super) async fn deliver(&mut self) {
        if let Some(reader) = &self.reader
            && let Ok(permit) = reader.reserve().await
            && let Some(piece) = self.waiting.take()
        {
            permit.send(piece);
        }
        self.waiting = None;
        if self.is_over {
            self.reader = None;
        }
    }
}
