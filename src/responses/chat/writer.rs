//! Writes events as an engine with the Responses API does: without names, numbers and ids, which the router writes
//! itself. Pure.

use std::fmt::Display;
use std::io::Write as _;

/// Writes the start of an event's data, up to its own members.
pub(super) fn begin(out: &mut Vec<u8>, kind: impl Display, index: usize) {
    // Writing to memory cannot fail.
    let _ = write!(
        out,
        r#"data: {{"type":"response.{kind}","output_index":{index}"#
    );
}

/// As [`begin`], for an event within an item: its id is a place for the router's own.
pub(super) fn begin_in_item(out: &mut Vec<u8>, kind: impl Display, index: usize) {
    begin(out, kind, index);
    out.extend_from_slice(br#","item_id":"""#);
}

pub(super) fn end(out: &mut Vec<u8>) {
    out.extend_from_slice(b"}\n\n");
}

pub(super) fn item_event(out: &mut Vec<u8>, kind: &str, index: usize, item: &[u8]) {
    begin(out, kind, index);
    out.extend_from_slice(br#","item":"#);
    out.extend_from_slice(item);
    end(out);
}

pub(super) fn part_event(
    out: &mut Vec<u8>,
    kind: &str,
    index: usize,
    content_index: usize,
    part: &[u8],
) {
    begin_in_item(out, kind, index);
    let _ = write!(out, r#","content_index":{content_index},"part":"#);
    out.extend_from_slice(part);
    end(out);
}
