//! The events of a stream as frames. Pure.

use bytes::{Bytes, BytesMut};

use crate::responses::websocket::client_frame::Lane;

/// What a stream ends with over HTTP. Over a WebSocket the last event is the end.
const DONE: &[u8] = b"[DONE]";

/// Cuts the pieces of a stream, each of whole events as the Responses API writes them, into the events' data.
#[derive(Debug)]
pub(super) struct Events {
    /// The member with the lane's name, and the end of the object.
    tail: Option<Bytes>,
}

impl Events {
    pub(super) fn new(lane: &Lane) -> Self {
        // A name has no character that JSON escapes.
        let tail = lane
            .name()
            .map(|name| format!(r#","stream_id":"{name}"}}"#));
        Self {
            tail: tail.map(Bytes::from),
        }
    }

    /// Calls `send` with each event of `piece`.
    pub(super) fn of(&self, piece: &Bytes, mut send: impl FnMut(Bytes)) {
        let mut begin = 0;
        for end in memchr::memchr_iter(b'\n', piece) {
            let line = begin..end;
            begin = end + 1;
            let Some(data) = piece[line.clone()].strip_prefix(b"data: ") else {
                continue;
            };
            if data == DONE {
                continue;
            }
            match &self.tail {
                None => send(piece.slice(line.end - data.len()..line.end)),
                Some(tail) => {
                    let data = data.strip_suffix(b"}").unwrap_or(data);
                    let mut event = BytesMut::with_capacity(data.len() + tail.len());
                    event.extend_from_slice(data);
                    event.extend_from_slice(tail);
                    send(event.freeze());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(lane: &str, piece: &str) -> Vec<String> {
        let lane = Lane::named(lane).unwrap_or_default();
        let mut found = Vec::new();
        let piece = Bytes::from(piece.to_owned());
        Events::new(&lane).of(&piece, |event| {
            found.push(String::from_utf8(event.to_vec()).unwrap());
        });
        found
    }

    #[test]
    fn each_event_is_its_data_without_the_end_of_a_stream() {
        let piece = "event: a\ndata: {\"type\":\"a\"}\n\n: keep-alive\n\nevent: b\ndata: {\"type\":\"b\",\"x\":\"data: \"}\n\ndata: [DONE]\n\n";
        assert_eq!(
            events("", piece),
            [r#"{"type":"a"}"#, r#"{"type":"b","x":"data: "}"#]
        );
        assert_eq!(
            events("main", piece),
            [
                r#"{"type":"a","stream_id":"main"}"#,
                r#"{"type":"b","x":"data: ","stream_id":"main"}"#
            ]
        );
        assert!(events("", ": keep-alive\n\n").is_empty());
    }
}
