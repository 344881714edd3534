//! Joins pieces of an answer. A single piece is not copied.

use bytes::{Bytes, BytesMut};

/// Pieces that are available at once are passed on as one, up to about this size.
pub(super) const BATCH_BYTES: usize = 8 << 10;

#[derive(Default)]
pub(super) struct Batch {
    first: Bytes,
    all: BytesMut,
}

impl Batch {
    pub(super) fn push(&mut self, piece: Bytes) {
        if self.len() == 0 {
            self.first = piece;
            return;
        }
        if self.all.is_empty() {
            self.all.reserve(BATCH_BYTES);
            self.all.extend_from_slice(&self.first);
        }
        self.all.extend_from_slice(&piece);
    }

    pub(super) fn len(&self) -> usize {
        self.first.len().max(self.all.len())
    }

    pub(super) fn take(self) -> Bytes {
        if self.all.is_empty() {
            self.first
        } else {
            self.all.freeze()
        }
    }
}

pub(super) fn join(first: Bytes, second: Bytes) -> Bytes {
    match (first.is_empty(), second.is_empty()) {
        (_, true) => first,
        (true, false) => second,
        (false, false) => [first, second].concat().into(),
    }
}
