//! The text around an engine's delta, which is the same from token to token: an event of the same shape is written without
//! being parsed. Pure.

use std::borrow::Cow;
use std::io::Write as _;
use std::ops::Range;

use super::stream_state::{LastDelta, StreamState};
use crate::responses::engine_events::EngineEvent;
use crate::responses::members;
use crate::responses::outcome::Outcome;

/// Two deltas of the same shape differ in their number and their text alone.
#[derive(Debug)]
pub(super) struct DeltaShape {
    /// The engine's name of the event.
    name: String,
    /// The place of its item among the open ones.
    open: usize,
    engine: Around,
    client: Around,
}

/// What is before, between and after the number and the delta.
#[derive(Debug)]
struct Around {
    is_number_first: bool,
    parts: [Vec<u8>; 3],
}

impl Around {
    fn new(text: &[u8], [number, delta]: &[Range<usize>; 2]) -> Option<Self> {
        let is_number_first = number.start < delta.start;
        let (first, second) = if is_number_first {
            (number, delta)
        } else {
            (delta, number)
        };
        let parts = [
            0..first.start,
            first.end..second.start,
            second.end..text.len(),
        ];
        let [before, between, after] = parts.map(|part| text.get(part).map(<[u8]>::to_vec));
        Some(Self {
            is_number_first,
            parts: [before?, between?, after?],
        })
    }
}

impl DeltaShape {
    /// `lines` and `out`: an engine's event and what was written, which ends with what was written for it. `None` if its
    /// data was not one line.
    fn new(lines: &[u8], event: &EngineEvent<'_>, last: LastDelta, out: &[u8]) -> Option<Self> {
        let Cow::Borrowed(data) = event.data else {
            return None;
        };
        let data_begin = (data.as_ptr() as usize).checked_sub(lines.as_ptr() as usize)?;
        let in_lines = last
            .places
            .in_data
            .map(|place| data_begin + place.start..data_begin + place.end);
        let begin = last.begin;
        let in_written = last
            .places
            .in_out
            .map(|place| place.start - begin..place.end - begin);
        Some(Self {
            name: last.name,
            open: last.open,
            engine: Around::new(lines, &in_lines)?,
            client: Around::new(out.get(begin..)?, &in_written)?,
        })
    }

    /// The delta of an event of this shape, as a JSON string. `None` for any other event, and for a delta with escapes,
    /// which must be checked.
    fn delta<'a>(&self, lines: &'a [u8]) -> Option<&'a str> {
        let [before, between, after] = &self.engine.parts;
        let rest = lines.strip_prefix(&before[..])?.strip_suffix(&after[..])?;
        let delta = if self.engine.is_number_first {
            skip_number(rest)?.strip_prefix(&between[..])?
        } else {
            let end = string_length(rest)?;
            let (delta, rest) = rest.split_at(end);
            let is_same = skip_number(rest.strip_prefix(&between[..])?)?.is_empty();
            is_same.then_some(delta)?
        };
        let is_whole = string_length(delta)? == delta.len();
        std::str::from_utf8(delta).ok().filter(|_| is_whole)
    }

    /// Writes the client's event.
    fn write(&self, number: u64, delta: &str, out: &mut Vec<u8>) {
        let [before, between, after] = &self.client.parts;
        out.extend_from_slice(before);
        // Writing to memory cannot fail.
        if self.client.is_number_first {
            let _ = write!(out, "{number}");
            out.extend_from_slice(between);
            out.extend_from_slice(delta.as_bytes());
        } else {
            out.extend_from_slice(delta.as_bytes());
            out.extend_from_slice(between);
            let _ = write!(out, "{number}");
        }
        out.extend_from_slice(after);
    }
}

impl StreamState {
    /// Writes a delta of this shape. False if it is something else.
    fn splice(&mut self, shape: &DeltaShape, lines: &[u8], out: &mut Vec<u8>) -> bool {
        let delta = shape.delta(lines);
        let (Some(delta), Some(open)) = (delta, self.open.get_mut(shape.open)) else {
            return false;
        };
        let text = members::escaped(delta).unwrap_or_default();
        if self.bytes + text.len() > self.bytes_max {
            return false;
        }
        self.bytes += open.push(&shape.name, text);
        shape.write(self.writer.number(), delta, out);
        true
    }
}

/// Passes the lines of an engine's event on to the stream. `shape`: that of the event before, if it was a delta.
pub(super) fn on_lines(
    stream: &mut StreamState,
    shape: &mut Option<DeltaShape>,
    lines: &[u8],
    out: &mut Vec<u8>,
) -> Option<Outcome> {
    if let Some(shape) = shape
        && stream.splice(shape, lines, out)
    {
        return None;
    }
    let event = EngineEvent::read(lines)?;
    stream.last_delta = None;
    let outcome = stream.on_event(&event, out);
    let last = stream.last_delta.take();
    *shape = last.and_then(|last| DeltaShape::new(lines, &event, last, out));
    outcome
}

/// What follows an integer.
fn skip_number(text: &[u8]) -> Option<&[u8]> {
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    (digits > 0).then(|| &text[digits..])
}

/// The length of the JSON string that the text begins with; `None` if it has escapes, or line ends.
fn string_length(text: &[u8]) -> Option<usize> {
    let text = text.strip_prefix(b"\"")?;
    let is_plain = |byte: &u8| !matches!(byte, 0..b' ' | b'"' | b'\\');
    let length = text.iter().take_while(|byte| is_plain(byte)).count();
    (text.get(length) == Some(&b'"')).then_some(length + 2)
}
