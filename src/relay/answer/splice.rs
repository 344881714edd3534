//! Edits of a piece of an answer: parts replaced, all other bytes as they are.

use std::borrow::Cow;
use std::ops::Range;

use bytes::{Bytes, BytesMut};
use smallvec::SmallVec;

/// The edits of one piece, and its edited form so far. Nothing is copied before the first edit.
#[derive(Debug)]
pub(in crate::relay) struct Splice<'a> {
    input: &'a [u8],
    output: BytesMut,
    /// Up to here the input is copied, or left out.
    position: usize,
    /// The edits of the event that is read, in any order.
    edits: SmallVec<[(Range<usize>, Cow<'a, str>); 8]>,
}

impl<'a> Splice<'a> {
    pub(in crate::relay) fn new(input: &'a [u8]) -> Self {
        Self {
            input,
            output: BytesMut::new(),
            position: 0,
            edits: SmallVec::new(),
        }
    }

    /// Replaces `part`, which is a part of the input.
    pub(in crate::relay) fn replace(&mut self, part: &str, text: impl Into<Cow<'a, str>>) {
        let start = part.as_ptr().addr() - self.input.as_ptr().addr();
        self.edits.push((start..start + part.len(), text.into()));
    }

    /// Carries out the edits of an event.
    pub(in crate::relay) fn apply(&mut self) {
        self.edits.sort_unstable_by_key(|(range, _)| range.start);
        for (range, text) in std::mem::take(&mut self.edits) {
            self.put(range, text.as_bytes());
        }
    }

    /// Leaves an event out.
    pub(in crate::relay) fn drop_event(&mut self, range: Range<usize>) {
        self.edits.clear();
        self.put(range, b"");
    }

    /// Puts a text in place of a range behind everything before.
    pub(in crate::relay) fn put(&mut self, range: Range<usize>, text: &[u8]) {
        if self.output.capacity() == 0 {
            self.output.reserve(self.input.len() + text.len());
        }
        self.output
            .extend_from_slice(&self.input[self.position..range.start]);
        self.output.extend_from_slice(text);
        self.position = range.end;
    }

    /// Leaves out what comes up to `end`, behind everything before.
    pub(in crate::relay) fn leave_out(&mut self, end: usize) {
        self.position = end;
    }

    /// The edited piece up to `end`; `None` if nothing changed.
    pub(in crate::relay) fn finish(mut self, end: usize) -> Option<Bytes> {
        if self.position == 0 && self.output.is_empty() && end == self.input.len() {
            return None;
        }
        if self.position < end {
            self.output
                .extend_from_slice(&self.input[self.position..end]);
        }
        Some(self.output.freeze())
    }
}
