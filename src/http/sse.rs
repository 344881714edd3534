//! Server-sent events: where an event ends, and what it contains. Pure.
//!
//! `Aligner` forwards bytes in whole events, so that an error event can still end a stream that breaks
//! off; `Decoder` reads events from bytes, however they are split.

use std::sync::LazyLock;

use bytes::{Bytes, BytesMut};
use memchr::memmem::Finder;

/// Finds the end of an event whose lines end in LF. It is made once and not with each search.
pub static BLANK: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\n\n"));
static BLANK_CRLF: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\n\r\n"));

/// A comment, which clients ignore. It keeps proxies from closing an idle connection.
pub const KEEP_ALIVE: &[u8] = b": keep-alive\n\n";

/// Forwards bytes, unchanged and in order, up to the end of the last complete event, and keeps the rest
/// until its event is complete. A client could not read an error event after half of another one.
#[derive(Debug)]
pub struct Aligner {
    incomplete: BytesMut,
    max_incomplete_bytes: usize,
}

impl Aligner {
    pub fn new(max_incomplete_bytes: usize) -> Self {
        Self {
            incomplete: BytesMut::new(),
            max_incomplete_bytes,
        }
    }

    /// Returns the bytes to forward now; none while an event is incomplete. An event larger than the bound
    /// is forwarded in pieces.
    pub fn push(&mut self, mut frame: Bytes) -> Bytes {
        if self.incomplete.is_empty() {
            if frame.ends_with(b"\n\n") {
                return frame;
            }
            let end = last_event_end(&frame);
            self.incomplete.extend_from_slice(&frame[end..]);
            frame.truncate(end);
            return if frame.is_empty() {
                self.overflow()
            } else {
                frame
            };
        }
        self.incomplete.extend_from_slice(&frame);
        match last_event_end(&self.incomplete) {
            0 => self.overflow(),
            end => self.incomplete.split_to(end).freeze(),
        }
    }

    /// The kept bytes, when the stream has ended.
    pub fn finish(&mut self) -> Bytes {
        self.incomplete.split().freeze()
    }

    fn overflow(&mut self) -> Bytes {
        if self.incomplete.len() > self.max_incomplete_bytes {
            self.finish()
        } else {
            Bytes::new()
        }
    }
}

/// The index after the last blank line, 0 if there is none.
fn last_event_end(bytes: &[u8]) -> usize {
    let mut end = bytes.len();
    while let Some(newline) = memchr::memrchr(b'\n', &bytes[..end]) {
        let before = &bytes[..newline];
        let before = before.strip_suffix(b"\r").unwrap_or(before);
        if before.ends_with(b"\n") {
            return newline + 1;
        }
        end = newline;
    }
    0
}

/// The index after the first event, or after all bytes if none is complete.
pub fn event_end(bytes: &[u8]) -> usize {
    let lf = BLANK.find(bytes).map(|found| found + 2);
    // Nearly every event ends in LF.
    let before = &bytes[..lf.unwrap_or(bytes.len())];
    let crlf = match memchr::memchr(b'\r', before) {
        Some(_) => BLANK_CRLF.find(before).map(|found| found + 3),
        None => None,
    };
    crlf.or(lf).unwrap_or(bytes.len())
}

/// The lines of some events, without the LF at their ends.
pub fn lines(events: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(events);
    std::iter::from_fn(move || {
        let left = rest.take()?;
        let Some(end) = memchr::memchr(b'\n', left) else {
            return Some(left);
        };
        rest = Some(&left[end + 1..]);
        Some(&left[..end])
    })
}

/// One event: its type (empty if it names none) and its data lines, joined.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Event {
    pub event: String,
    pub data: String,
}

/// Reads events from a byte stream. Lines end in LF, CR LF or CR, as the HTML standard specifies.
#[derive(Debug, Default)]
pub struct Decoder {
    line: Vec<u8>,
    after_cr: bool,
    event: Event,
    has_data: bool,
    line_bytes_max: Option<usize>,
    /// A line or an event exceeded the bound; no more events follow.
    pub overflowed: bool,
}

impl Decoder {
    /// A decoder that gives up on a line, or on an event's data, of more than `line_bytes_max`.
    pub fn bounded(line_bytes_max: usize) -> Self {
        Self {
            line_bytes_max: Some(line_bytes_max),
            ..Self::default()
        }
    }

    /// Appends the events that become complete with `bytes`.
    pub fn push(&mut self, mut bytes: &[u8], events: &mut Vec<Event>) {
        if self.overflowed {
            return;
        }
        if self.after_cr && !bytes.is_empty() {
            self.after_cr = false;
            bytes = bytes.strip_prefix(b"\n").unwrap_or(bytes);
        }
        while let Some(end) = memchr::memchr2(b'\n', b'\r', bytes) {
            self.line.extend_from_slice(&bytes[..end]);
            let is_cr = bytes[end] == b'\r';
            bytes = &bytes[end + 1..];
            if is_cr {
                match bytes.strip_prefix(b"\n") {
                    Some(rest) => bytes = rest,
                    None => self.after_cr = bytes.is_empty(),
                }
            }
            let line = std::mem::take(&mut self.line);
            self.on_line(&line, events);
            self.line = line;
            self.line.clear();
        }
        self.line.extend_from_slice(bytes);
        let longest = self.line.len().max(self.event.data.len());
        self.overflowed = self.line_bytes_max.is_some_and(|max| longest > max);
    }

    fn on_line(&mut self, line: &[u8], events: &mut Vec<Event>) {
        if line.is_empty() {
            let event = std::mem::take(&mut self.event);
            if std::mem::take(&mut self.has_data) {
                events.push(event);
            }
            return;
        }
        let (name, value) = match memchr::memchr(b':', line) {
            Some(colon) => (&line[..colon], &line[colon + 1..]),
            None => (line, &b""[..]),
        };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match name {
            b"data" => {
                if self.has_data {
                    self.event.data.push('\n');
                }
                self.has_data = true;
                self.event.data.push_str(&String::from_utf8_lossy(value));
            }
            b"event" => self.event.event = String::from_utf8_lossy(value).into_owned(),
            // Comments, `id` and `retry` do not concern anyone here.
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode(pieces: &[&[u8]]) -> Vec<Event> {
        let mut decoder = Decoder::default();
        let mut events = Vec::new();
        for piece in pieces {
            decoder.push(piece, &mut events);
        }
        events
    }

    fn event(event: &str, data: &str) -> Event {
        Event {
            event: event.to_owned(),
            data: data.to_owned(),
        }
    }

    #[test]
    fn events_are_read_whatever_ends_their_lines() {
        for text in [
            "event: a\ndata: 1\ndata: 2\n\n",
            "event:a\r\ndata:1\r\ndata:2\r\n\r\n",
            "event: a\rdata: 1\rdata: 2\r\r",
        ] {
            assert_eq!(decode(&[text.as_bytes()]), [event("a", "1\n2")], "{text:?}");
        }
    }

    #[test]
    fn comments_and_events_without_data_are_skipped() {
        assert_eq!(
            decode(&[b": ping\n\nevent: x\n\ndata: y\n\n"]),
            [event("", "y")]
        );
    }

    #[test]
    fn a_line_past_the_bound_ends_the_decoding() {
        let mut decoder = Decoder::bounded(8);
        let mut events = Vec::new();
        decoder.push(b"data: 123456789", &mut events);
        assert!(decoder.overflowed);
    }

    #[test]
    fn half_an_event_is_kept_until_it_is_complete() {
        let mut aligner = Aligner::new(1024);
        assert_eq!(
            aligner.push(Bytes::from_static(b"data: 1\n\ndata: 2")),
            "data: 1\n\n"
        );
        assert_eq!(aligner.push(Bytes::from_static(b"\n")), "");
        assert_eq!(
            aligner.push(Bytes::from_static(b"\ndata: 3")),
            "data: 2\n\n"
        );
        assert_eq!(aligner.finish(), "data: 3");
    }

    #[test]
    fn an_event_past_the_bound_passes_in_pieces() {
        let mut aligner = Aligner::new(4);
        assert_eq!(
            aligner.push(Bytes::from_static(b"data: long")),
            "data: long"
        );
    }

    fn cut(text: &[u8], cuts: &[usize]) -> Vec<Vec<u8>> {
        let mut places: Vec<usize> = cuts.iter().map(|cut| cut % (text.len() + 1)).collect();
        places.push(text.len());
        places.sort_unstable();
        let mut start = 0;
        places
            .into_iter()
            .map(|end| {
                let piece = text[start..end].to_vec();
                start = end;
                piece
            })
            .collect()
    }

    proptest! {
        #[test]
        fn any_split_of_the_bytes_gives_the_same_events(
            lines in proptest::collection::vec("(data|event|id|)(:| :|: )[a-z ]{0,6}(\n|\r\n|\r|\n\n|\r\n\r\n|\r\r)", 0..20),
            cuts in proptest::collection::vec(any::<usize>(), 0..12),
        ) {
            let text = lines.concat().into_bytes();
            let pieces = cut(&text, &cuts);
            let pieces: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
            prop_assert_eq!(decode(&pieces), decode(&[&text]));
        }

        #[test]
        fn lines_end_where_a_byte_for_byte_search_ends_them(text in "(data: [a-z]{0,40}\r?\n{0,3}){0,4}") {
            let found: Vec<&[u8]> = lines(text.as_bytes()).collect();
            let expected: Vec<&[u8]> = text.as_bytes().split(|byte| *byte == b'\n').collect();
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn an_aligner_changes_no_byte_and_stops_only_between_events(
            text in "(data: [a-z]{0,5}\n{1,3}){0,12}[a-z]{0,4}",
            cuts in proptest::collection::vec(any::<usize>(), 0..12),
        ) {
            let mut aligner = Aligner::new(usize::MAX);
            let mut passed = Vec::new();
            for piece in cut(text.as_bytes(), &cuts) {
                let out = aligner.push(Bytes::from(piece));
                prop_assert!(out.is_empty() || out.ends_with(b"\n\n"));
                passed.extend_from_slice(&out);
            }
            passed.extend_from_slice(&aligner.finish());
            prop_assert_eq!(passed, text.as_bytes());
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), cuts in proptest::collection::vec(any::<usize>(), 0..6)) {
            let pieces = cut(&bytes, &cuts);
            let pieces: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
            decode(&pieces);
            let mut aligner = Aligner::new(16);
            for piece in &pieces {
                aligner.push(Bytes::copy_from_slice(piece));
            }
        }
    }
}
