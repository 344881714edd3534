//! What a client is told of a request that was split: the tokens that were cached where the prompt was
//! computed, since a decode worker counts all that it was handed; and nothing of what passed between the
//! workers. All else passes byte for byte. Pure.

use std::sync::LazyLock;

use bytes::{Bytes, BytesMut};
use memchr::{memchr, memchr2, memchr3, memmem};

static CACHED: LazyLock<memmem::Finder<'static>> =
    LazyLock::new(|| memmem::Finder::new("\"cached_tokens\""));
static PARAMS: LazyLock<memmem::Finder<'static>> =
    LazyLock::new(|| memmem::Finder::new("\"kv_transfer_params\""));

/// Corrects one answer on its way. Its length may change, so no `content-length` may pass with it.
#[derive(Debug)]
pub struct UsageRewriter {
    cached_tokens: String,
    /// Server-sent events; else one JSON text.
    is_events: bool,
    line: Line,
    walk: Walk,
}

impl UsageRewriter {
    /// `cached_tokens` are the prefill leg's. `is_events` for server-sent events, else one JSON text.
    pub fn new(cached_tokens: u64, is_events: bool) -> Self {
        Self {
            cached_tokens: cached_tokens.to_string(),
            is_events,
            line: match is_events {
                true => Line::Prefix(0),
                false => Line::Json,
            },
            walk: Walk::default(),
        }
    }

    /// Any piece of the answer, in order; what is returned may be shorter or longer, or empty. A piece in
    /// which nothing is to be changed comes back as it is.
    pub fn on_data(&mut self, data: Bytes) -> Bytes {
        // Nearly every piece of a stream: whole lines, none of which has anything to change.
        if self.is_events
            && matches!(self.line, Line::Prefix(0))
            && data.last() == Some(&b'\n')
            && CACHED.find(&data).is_none()
            && PARAMS.find(&data).is_none()
        {
            return data;
        }
        let mut out = Edited {
            data: &data,
            from: (!self.walk.is_leaving_out()).then_some(0),
            made: BytesMut::new(),
        };
        let mut at = 0;
        while at < data.len() {
            at = self.step(at, &mut out);
        }
        match out.finish() {
            Some(edited) => edited,
            None => data,
        }
    }

    /// Takes one byte, or as many as nothing is to be learnt of. Returns where to go on.
    fn step(&mut self, at: usize, out: &mut Edited<'_>) -> usize {
        let data = out.data;
        let byte = data[at];
        // In JSON no raw line break is part of a string, so each line begins anew, whatever was before.
        if self.is_events && byte == b'\n' {
            out.resume(at);
            self.line = Line::Prefix(0);
            self.walk = Walk::default();
            return at + 1;
        }
        match self.line {
            Line::Prefix(matched) => {
                self.line = match FIELD.get(matched) {
                    Some(expected) if *expected == byte => match matched + 1 == FIELD.len() {
                        true => Line::Json,
                        false => Line::Prefix(matched + 1),
                    },
                    _ => Line::Other,
                };
                at + 1
            }
            Line::Other => {
                let rest = memchr(b'\n', &data[at..]);
                rest.map_or(data.len(), |found| at + found)
            }
            Line::Json => self.walk.step(at, out, &self.cached_tokens, self.is_events),
        }
    }
}

/// What a line of an event stream begins with that has JSON in it.
const FIELD: &[u8] = b"data:";

/// Where in a line of an event stream.
#[derive(Clone, Copy, Debug)]
enum Line {
    /// So much of `data:` was there.
    Prefix(usize),
    Json,
    Other,
}

/// A piece with parts of it left out or put in. Nothing is copied before the first change.
struct Edited<'a> {
    data: &'a [u8],
    /// From where on what was seen is kept; none while it is left out.
    from: Option<usize>,
    made: BytesMut,
}

impl Edited<'_> {
    /// Keeps what is before `at`, puts `text` there, and leaves out what follows.
    fn replace(&mut self, at: usize, text: &str) {
        self.leave_out(at);
        self.made.extend_from_slice(text.as_bytes());
    }

    fn leave_out(&mut self, at: usize) {
        if let Some(from) = self.from.take() {
            self.made.extend_from_slice(&self.data[from..at]);
        }
    }

    fn resume(&mut self, at: usize) {
        self.from.get_or_insert(at);
    }

    /// None where nothing was changed.
    fn finish(mut self) -> Option<Bytes> {
        if self.from == Some(0) {
            return None;
        }
        self.leave_out(self.data.len());
        Some(self.made.freeze())
    }
}

/// What stands in an answer at a place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Node {
    #[default]
    Other,
    /// An answer or an event.
    Root,
    /// A response within an event.
    Response,
    Usage,
    Details,
    /// The number of cached tokens.
    Cached,
    /// What passes between workers.
    Params,
}

impl Node {
    fn child(self, key: &[u8]) -> Self {
        match (self, key) {
            (Node::Root, b"response") => Node::Response,
            (Node::Root | Node::Response, b"usage") => Node::Usage,
            (Node::Root | Node::Response, b"kv_transfer_params") => Node::Params,
            (Node::Usage, b"prompt_tokens_details" | b"input_tokens_details") => Node::Details,
            (Node::Details, b"cached_tokens") => Node::Cached,
            _ => Node::Other,
        }
    }
}

/// No path that matters is deeper: an event's response's usage's details.
const DEPTH_MAX: usize = 4;
/// No key that matters is longer.
const KEY_BYTES_MAX: usize = 24;

/// One JSON text, in whatever pieces it comes. What is no JSON leads it astray until the line ends, and
/// changes nothing unless it has these very keys in these very places.
#[derive(Debug, Default)]
struct Walk {
    state: Walking,
    /// The objects and lists that are open; of those deeper than `path`, nothing is to be known.
    depth: usize,
    path: [Node; DEPTH_MAX],
    /// Whether the next string is a key.
    is_key_next: bool,
    key: Key,
    /// What the value that comes now is.
    next: Node,
}

#[derive(Clone, Copy, Debug, Default)]
enum Walking {
    #[default]
    Between,
    Text {
        is_key: bool,
        is_escaped: bool,
    },
    /// The rest of a number that is replaced.
    OldNumber,
    /// The rest of a number, a word.
    OldWord,
    /// A text in a value that is left out, or such a value itself.
    OldText {
        depth: usize,
        is_escaped: bool,
    },
    /// In an object or a list that is left out, with so many of them open.
    Old {
        depth: usize,
    },
}

/// A key's bytes as far as they matter.
#[derive(Debug, Default)]
struct Key {
    bytes: [u8; KEY_BYTES_MAX],
    len: usize,
}

impl Key {
    fn push(&mut self, text: &[u8]) {
        match self.bytes.get_mut(self.len..self.len + text.len()) {
            Some(room) => {
                room.copy_from_slice(text);
                self.len += text.len();
            }
            None => self.spoil(),
        }
    }

    /// It is none that matters.
    fn spoil(&mut self) {
        self.len = KEY_BYTES_MAX + 1;
    }

    fn text(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

impl Walk {
    fn is_leaving_out(&self) -> bool {
        !matches!(self.state, Walking::Between | Walking::Text { .. })
    }

    fn step(
        &mut self,
        at: usize,
        out: &mut Edited<'_>,
        cached_tokens: &str,
        is_events: bool,
    ) -> usize {
        let data = out.data;
        let byte = data[at];
        match self.state {
            Walking::Between => {
                self.on_structure(byte, at, out, cached_tokens);
                at + 1
            }
            Walking::Text { is_key, is_escaped } => {
                let (end, state) = in_text(data, at, is_escaped, is_events);
                if is_key {
                    match is_escaped || data[at..end].contains(&b'\\') {
                        true => self.key.spoil(),
                        false => self
                            .key
                            .push(data[at..end].strip_suffix(b"\"").unwrap_or(&data[at..end])),
                    }
                }
                self.state = match state {
                    InText::Ended => Walking::Between,
                    InText::Goes { is_escaped } => Walking::Text { is_key, is_escaped },
                };
                end
            }
            Walking::OldNumber => match byte {
                b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E' => at + 1,
                _ => self.go_on(at, out),
            },
            Walking::OldWord => match byte {
                b',' | b'}' | b']' | b' ' | b'\t' | b'\n' | b'\r' => self.go_on(at, out),
                _ => at + 1,
            },
            Walking::OldText { depth, is_escaped } => {
                let (end, state) = in_text(data, at, is_escaped, is_events);
                self.state = match state {
                    InText::Goes { is_escaped } => Walking::OldText { depth, is_escaped },
                    InText::Ended if depth == 0 => return self.go_on(end, out),
                    InText::Ended => Walking::Old { depth },
                };
                end
            }
            Walking::Old { depth } => {
                self.state = match byte {
                    b'"' => Walking::OldText {
                        depth,
                        is_escaped: false,
                    },
                    b'{' | b'[' => Walking::Old { depth: depth + 1 },
                    b'}' | b']' if depth == 1 => return self.go_on(at + 1, out),
                    b'}' | b']' => Walking::Old { depth: depth - 1 },
                    _ => return at + 1,
                };
                at + 1
            }
        }
    }

    /// A value has been left out; what follows passes.
    fn go_on(&mut self, at: usize, out: &mut Edited<'_>) -> usize {
        out.resume(at);
        self.state = Walking::Between;
        at
    }

    fn on_structure(&mut self, byte: u8, at: usize, out: &mut Edited<'_>, cached_tokens: &str) {
        match byte {
            b' ' | b'\t' | b'\n' | b'\r' => {}
            b':' => self.next = self.here().child(self.key.text()),
            b',' => {
                self.next = Node::Other;
                self.is_key_next = true;
            }
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                self.next = Node::Other;
                self.is_key_next = false;
            }
            _ => self.on_value(byte, at, out, cached_tokens),
        }
    }

    /// A value's or a key's first byte, or a later one of a number or a word.
    fn on_value(&mut self, byte: u8, at: usize, out: &mut Edited<'_>, cached_tokens: &str) {
        let next = std::mem::take(&mut self.next);
        if next == Node::Params && byte != b'n' {
            out.replace(at, "null");
            self.state = match byte {
                b'"' => Walking::OldText {
                    depth: 0,
                    is_escaped: false,
                },
                b'{' | b'[' => Walking::Old { depth: 1 },
                _ => Walking::OldWord,
            };
            return;
        }
        match byte {
            b'"' => {
                let is_key = self.is_key_next && self.here() != Node::Other;
                self.is_key_next = false;
                self.key.len = 0;
                self.state = Walking::Text {
                    is_key,
                    is_escaped: false,
                };
            }
            b'{' | b'[' => {
                let is_object = byte == b'{';
                if let Some(place) = self.path.get_mut(self.depth) {
                    *place = match (is_object, self.depth) {
                        (true, 0) => Node::Root,
                        (true, _) => next,
                        (false, _) => Node::Other,
                    };
                }
                self.depth += 1;
                self.is_key_next = is_object;
            }
            b'0'..=b'9' if next == Node::Cached => {
                out.replace(at, cached_tokens);
                self.state = Walking::OldNumber;
            }
            _ => {}
        }
    }

    /// What the innermost open object is.
    fn here(&self) -> Node {
        let place = self.depth.checked_sub(1);
        place
            .and_then(|place| self.path.get(place).copied())
            .unwrap_or_default()
    }
}

enum InText {
    Ended,
    Goes { is_escaped: bool },
}

/// From within a string to after its end, or as far as there is anything. In an event stream not past the
/// line's end.
fn in_text(data: &[u8], at: usize, is_escaped: bool, is_events: bool) -> (usize, InText) {
    let from = if is_escaped { at + 1 } else { at };
    let goes = |is_escaped| InText::Goes { is_escaped };
    let rest = data.get(from..).unwrap_or_default();
    let found = match is_events {
        true => memchr3(b'"', b'\\', b'\n', rest),
        false => memchr2(b'"', b'\\', rest),
    };
    match found {
        None => (data.len(), goes(false)),
        Some(found) => match rest[found] {
            b'"' => (from + found + 1, InText::Ended),
            b'\\' => (from + found + 1, goes(true)),
            // Not passed over: the line's end is for who reads lines.
            _ => (from + found, goes(false)),
        },
    }
}

#[cfg(test)]
mod tests;
