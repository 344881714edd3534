//! Removes and inserts parts of a piece of the response.

use bytes::{Bytes, BytesMut};

/// The edited form of one piece. Nothing is copied before the first change.
pub(super) struct Edits<'a> {
    input: &'a [u8],
    /// Start of the input that is kept and not copied yet; `None` while input is removed.
    kept_from: Option<usize>,
    output: BytesMut,
}

impl<'a> Edits<'a> {
    pub(super) fn new(input: &'a [u8], is_removing: bool) -> Self {
        Self {
            input,
            kept_from: (!is_removing).then_some(0),
            output: BytesMut::new(),
        }
    }

    pub(super) fn input(&self) -> &'a [u8] {
        self.input
    }

    /// Inserts `text` at `position` and removes the input from there on.
    pub(super) fn replace(&mut self, position: usize, text: &str) {
        self.remove_from(position);
        self.output.extend_from_slice(text.as_bytes());
    }

    fn remove_from(&mut self, position: usize) {
        if let Some(start) = self.kept_from.take() {
            self.output.extend_from_slice(&self.input[start..position]);
        }
    }

    /// Ends a removal: input is kept from `position` on.
    pub(super) fn keep_from(&mut self, position: usize) {
        self.kept_from.get_or_insert(position);
    }

    /// The edited piece; `None` if nothing changed.
    pub(super) fn finish(mut self) -> Option<Bytes> {
        if self.kept_from == Some(0) {
            return None;
        }
        self.remove_from(self.input.len());
        Some(self.output.freeze())
    }
}
