//! The lines of an object that is read in pieces. Pure.

use bytes::{Bytes, BytesMut};
use memchr::memchr;

/// Collects pieces, and gives the lines that are complete.
#[derive(Debug)]
pub(super) struct LinesOfPieces {
    held: BytesMut,
    /// How much of it is known to have no line break.
    searched: usize,
    max_line: usize,
    /// In a line that is too long, which is left out.
    is_skipping: bool,
}

impl LinesOfPieces {
    /// Longer lines than this are left out.
    pub(super) fn new(max_line: usize) -> Self {
        Self {
            held: BytesMut::new(),
            searched: 0,
            max_line,
            is_skipping: false,
        }
    }

    pub(super) fn push(&mut self, piece: &[u8]) {
        self.held.extend_from_slice(piece);
    }

    /// The next line that is complete, without its line break.
    pub(super) fn next_line(&mut self) -> Option<Bytes> {
        loop {
            let unsearched = self.held.get(self.searched..).unwrap_or_default();
            let Some(found) = memchr(b'\n', unsearched) else {
                self.searched = self.held.len();
                if self.searched > self.max_line {
                    self.held.clear();
                    self.searched = 0;
                    self.is_skipping = true;
                }
                return None;
            };
            let mut line = self.held.split_to(self.searched + found + 1);
            self.searched = 0;
            line.truncate(line.len() - 1);
            let is_rest = std::mem::take(&mut self.is_skipping);
            if !is_rest && line.len() <= self.max_line {
                return Some(line.freeze());
            }
        }
    }

    /// What stands behind the last line break.
    pub(super) fn rest(&mut self) -> Option<Bytes> {
        self.searched = 0;
        let rest = self.held.split().freeze();
        let is_line = !rest.is_empty() && !self.is_skipping && rest.len() <= self.max_line;
        is_line.then_some(rest)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lines(pieces: &[&[u8]], max_line: usize) -> Vec<Bytes> {
        let mut lines = LinesOfPieces::new(max_line);
        let mut found = Vec::new();
        for piece in pieces {
            lines.push(piece);
            while let Some(line) = lines.next_line() {
                found.push(line);
            }
        }
        found.extend(lines.rest());
        found
    }

    #[test]
    fn a_line_that_is_too_long_is_left_out() {
        let check = |pieces: &[&[u8]], expected: &[&str]| {
            assert_eq!(lines(pieces, 4), expected, "{pieces:?}");
        };
        check(&[b"1234\n12345\n1\n"], &["1234", "1"]);
        check(&[b"12", b"345", b"678", b"\n1\n2"], &["1", "2"]);
        check(&[b"123456"], &[]);
        check(&[b"1\n\n2"], &["1", "", "2"]);
    }

    proptest! {
        #[test]
        fn lines_are_the_same_however_they_are_cut(
            text in "[ab\n]{0,40}",
            size in 1..7_usize,
            max_line in 1..6_usize,
        ) {
            let whole = text.strip_suffix('\n').unwrap_or(&text);
            let expected = whole.split('\n').filter(|line| line.len() <= max_line);
            let mut expected: Vec<&str> = expected.collect();
            if text.is_empty() {
                expected.clear();
            }
            let pieces: Vec<&[u8]> = text.as_bytes().chunks(size).collect();
            prop_assert_eq!(lines(&pieces, max_line), expected);
        }
    }
}
