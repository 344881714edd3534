//! Splits an engine's byte stream into events, without copying those that arrive in one piece, unless their lines end in CR. Pure.

use std::borrow::Cow;

use memchr::memchr;

/// One event: its name, or empty, and its data.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct EngineEvent<'a> {
    pub(super) name: Cow<'a, str>,
    pub(super) data: Cow<'a, str>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct EngineEvents {
    /// What has come of the next event, with lines that end in LF.
    partial: Vec<u8>,
    /// Whether the last byte was a CR: an LF after it ends the same line.
    after_cr: bool,
    event_bytes_max: usize,
}

/// An event is longer than the limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct TooLong;

impl EngineEvents {
    pub(super) fn new(event_bytes_max: usize) -> Self {
        Self {
            partial: Vec::new(),
            after_cr: false,
            event_bytes_max,
        }
    }

    /// Calls `on` with each event that `bytes` complete, until it returns false.
    pub(super) fn push(
        &mut self,
        bytes: &[u8],
        mut on: impl FnMut(EngineEvent<'_>) -> bool,
    ) -> Result<(), TooLong> {
        self.push_lines(bytes, |lines| EngineEvent::read(lines).is_none_or(&mut on))
    }

    /// As [`EngineEvents::push`], with the lines of each event, without the empty one. There may be only a comment.
    pub(super) fn push_lines(
        &mut self,
        bytes: &[u8],
        mut on: impl FnMut(&[u8]) -> bool,
    ) -> Result<(), TooLong> {
        let bytes = self.with_lf(bytes);
        let mut whole = std::mem::take(&mut self.partial);
        // The end of an event may span two pieces.
        let mut searched = whole.len().saturating_sub(1);
        let text = if whole.is_empty() {
            &*bytes
        } else {
            whole.extend_from_slice(&bytes);
            &whole
        };
        let mut begin = 0;
        while let Some(end) = empty_line(&text[searched..]) {
            let end = searched + end;
            if !on(&text[begin..end]) {
                return Ok(());
            }
            begin = end + 2;
            searched = begin;
        }
        if text.len() - begin > self.event_bytes_max {
            return Err(TooLong);
        }
        self.partial = if whole.is_empty() {
            bytes[begin..].to_vec()
        } else {
            whole.drain(..begin);
            whole
        };
        Ok(())
    }

    /// The bytes with an LF in place of each CR LF, and of each CR.
    fn with_lf<'b>(&mut self, mut bytes: &'b [u8]) -> Cow<'b, [u8]> {
        if self.after_cr && !bytes.is_empty() {
            bytes = bytes.strip_prefix(b"\n").unwrap_or(bytes);
            self.after_cr = false;
        }
        if memchr(b'\r', bytes).is_none() {
            return Cow::Borrowed(bytes);
        }
        self.after_cr = bytes.ends_with(b"\r");
        let mut lines = Vec::with_capacity(bytes.len());
        for (at, byte) in bytes.iter().enumerate() {
            match byte {
                b'\r' => lines.push(b'\n'),
                b'\n' if bytes[..at].ends_with(b"\r") => {}
                _ => lines.push(*byte),
            }
        }
        Cow::Owned(lines)
    }
}

/// Where the first two line ends in a row begin. Lines are short: two searches for one byte cost less than one for two.
pub(super) fn empty_line(text: &[u8]) -> Option<usize> {
    let mut from = 0;
    loop {
        let at = from + memchr(b'\n', &text[from..])?;
        if text.get(at + 1) == Some(&b'\n') {
            return Some(at);
        }
        from = at + 1;
    }
}

impl<'a> EngineEvent<'a> {
    /// The event in these lines; `None` if there is only a comment.
    pub(super) fn read(lines: &'a [u8]) -> Option<Self> {
        let mut name = Cow::Borrowed("");
        let mut data: Option<Cow<'_, str>> = None;
        let mut rest = lines;
        while !rest.is_empty() {
            let end = memchr(b'\n', rest).unwrap_or(rest.len());
            let line = &rest[..end];
            rest = rest.get(end + 1..).unwrap_or_default();
            if let Some(value) = field(line, b"data") {
                data = Some(match data {
                    None => value,
                    // Data of several lines is JSON, in which a newline can become a space.
                    Some(before) => {
                        let mut joined = before.into_owned();
                        joined.push(' ');
                        joined.push_str(&value);
                        Cow::Owned(joined)
                    }
                });
            } else if let Some(value) = field(line, b"event") {
                name = value;
            }
        }
        data.map(|data| Self { name, data })
    }
}

fn field<'a>(line: &'a [u8], name: &[u8]) -> Option<Cow<'a, str>> {
    let rest = line.strip_prefix(name)?;
    let value = match rest.strip_prefix(b":") {
        Some(value) => value.strip_prefix(b" ").unwrap_or(value),
        None if rest.is_empty() => rest,
        None => return None,
    };
    // Nearly always text: checked at once, and not piece by piece.
    Some(match std::str::from_utf8(value) {
        Ok(text) => Cow::Borrowed(text),
        Err(_) => String::from_utf8_lossy(value),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::http::sse;

    fn read_all(pieces: &[&[u8]]) -> Vec<(String, String)> {
        let mut reader = EngineEvents::new(1 << 20);
        let mut all = Vec::new();
        for piece in pieces {
            reader
                .push(piece, |event| {
                    all.push((event.name.into_owned(), event.data.into_owned()));
                    true
                })
                .unwrap();
        }
        all
    }

    fn pair(name: &str, data: &str) -> (String, String) {
        (name.to_owned(), data.to_owned())
    }

    #[test]
    fn events_are_read_whatever_ends_their_lines() {
        for text in [
            "event: a\ndata: 1\ndata: 2\n\n: ping\n\ndata:3\n\n",
            "event: a\r\ndata: 1\r\ndata: 2\r\n\r\n: ping\r\n\r\ndata:3\r\n\r\n",
        ] {
            let expected = [pair("a", "1 2"), pair("", "3")];
            assert_eq!(read_all(&[text.as_bytes()]), expected, "{text:?}");
        }
    }

    #[test]
    fn a_space_stands_between_any_two_lines_of_data() {
        let text = "data: 1\ndata:\nevent: a\ndata: 2\ndata: 3\n\n";
        assert_eq!(read_all(&[text.as_bytes()]), [pair("a", "1  2 3")]);
    }

    #[test]
    fn an_event_past_the_bound_is_an_error() {
        let mut reader = EngineEvents::new(8);
        assert_eq!(reader.push(b"data: 123", |_| true), Err(TooLong));
    }

    #[test]
    fn nothing_is_read_after_on_returns_false() {
        let mut reader = EngineEvents::new(100);
        let mut fields = 0;
        let stop_at_once = |_: EngineEvent<'_>| {
            fields += 1;
            false
        };
        reader
            .push(b"data: 1\n\ndata: 2\n\n", stop_at_once)
            .unwrap();
        assert_eq!(fields, 1);
    }

    proptest! {
        #[test]
        fn any_cut_gives_the_same_events(
            lines in proptest::collection::vec("(data|event|id|)(:|: )[a-z]{0,6}(\n|\n\n|\n\n\n)", 0..20),
            ending in proptest::sample::select(vec!["\n", "\r\n", "\r"]),
            cuts in proptest::collection::vec(any::<usize>(), 0..12),
        ) {
            let text = lines.concat().replace('\n', ending).into_bytes();
            let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (text.len() + 1)).collect();
            ends.push(text.len());
            ends.sort_unstable();
            let mut begin = 0;
            let pieces: Vec<&[u8]> = ends.into_iter().map(|end| {
                let piece = &text[begin..end];
                begin = end;
                piece
            }).collect();
            let cut = read_all(&pieces);
            prop_assert_eq!(&cut, &read_all(&[&text]));
            let mut events = Vec::new();
            sse::Decoder::default().push(&text, &mut events);
            let plain: Vec<(String, String)> = events.into_iter().map(|event| (event.event, event.data.replace('\n', " "))).collect();
            prop_assert_eq!(cut, plain);
        }
    }
}
