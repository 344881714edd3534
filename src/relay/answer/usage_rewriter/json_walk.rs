//! Finds the values to edit in a JSON text without parsing it as a whole.

use memchr::{memchr2, memchr3};

use crate::relay::answer::cut_json::Name;
use crate::relay::answer::splice::Splice;

/// The meaning of a JSON value, by its path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Node {
    #[default]
    Other,
    /// The response, or an event of a stream.
    Root,
    /// The response inside an event.
    Response,
    Usage,
    Details,
    CachedTokens,
    /// Of Messages: prompt tokens besides the cached ones.
    InputTokens,
    /// Of Messages: those of them that were written into the cache.
    CreatedTokens,
    KvTransferParams,
}

impl Node {
    fn child(self, key: &[u8]) -> Self {
        match (self, key) {
            (Node::Root, b"response") => Node::Response,
            (Node::Root | Node::Response, b"usage") => Node::Usage,
            (Node::Root | Node::Response, b"kv_transfer_params") => Node::KvTransferParams,
            (Node::Usage, b"prompt_tokens_details" | b"input_tokens_details") => Node::Details,
            (Node::Details, b"cached_tokens") => Node::CachedTokens,
            (Node::Usage, b"cache_read_input_tokens") => Node::CachedTokens,
            (Node::Usage, b"input_tokens") => Node::InputTokens,
            (Node::Usage, b"cache_creation_input_tokens") => Node::CreatedTokens,
            _ => Node::Other,
        }
    }
}

/// What is written in place of an engine's counts.
#[derive(Debug)]
pub(super) struct Counts {
    pub(super) cached: String,
    /// For answers of Messages.
    pub(super) input: Option<String>,
}

impl Counts {
    fn of(&self, node: Node) -> Option<&str> {
        match node {
            Node::CachedTokens => Some(&self.cached),
            Node::InputTokens => self.input.as_deref(),
            // They are among the input tokens.
            Node::CreatedTokens => self.input.as_ref().map(|_| "0"),
            _ => None,
        }
    }
}

/// The deepest relevant path: root, response, usage, details.
const MAX_DEPTH: usize = 4;

/// Walks through one JSON text that arrives in pieces of any size, and edits it. Invalid JSON can confuse the walk
/// until the line ends; bytes still change only at the relevant keys in their places.
#[derive(Debug, Default)]
pub(super) struct JsonWalk {
    state: State,
    /// The number of open objects and lists. Those deeper than `path` are irrelevant.
    depth: usize,
    path: [Node; MAX_DEPTH],
    is_key_next: bool,
    key: Name,
    /// The meaning of the next value.
    next: Node,
}

#[derive(Clone, Copy, Debug, Default)]
enum State {
    #[default]
    Between,
    String {
        is_key: bool,
        is_escaped: bool,
    },
    /// The rest of a removed number or literal.
    RemovedWord,
    /// A removed string (`depth` 0), or a string inside a removed object or list.
    RemovedString {
        depth: usize,
        is_escaped: bool,
    },
    /// A removed object or list; `depth` counts the open ones.
    Removed {
        depth: usize,
    },
}

impl JsonWalk {
    /// True while input is being removed, so that the next piece begins with removed bytes.
    pub(super) fn is_removing(&self) -> bool {
        !matches!(self.state, State::Between | State::String { .. })
    }

    /// Consumes the bytes at `position`, or only ends a removal there. Returns the next position.
    pub(super) fn step(
        &mut self,
        data: &[u8],
        position: usize,
        out: &mut Splice<'_>,
        counts: &Counts,
        is_events: bool,
    ) -> usize {
        let byte = data[position];
        match self.state {
            State::Between => {
                self.on_structure(byte, position, out, counts);
                position + 1
            }
            State::String { is_key, is_escaped } => {
                let (end, state) = scan_string(data, position, is_escaped, is_events);
                if is_key {
                    let part = &data[position..end];
                    if is_escaped || part.contains(&b'\\') {
                        self.key.on_escape();
                    } else {
                        self.key.push(part.strip_suffix(b"\"").unwrap_or(part));
                    }
                }
                self.state = match state {
                    StringScan::Ended => State::Between,
                    StringScan::Continues { is_escaped } => State::String { is_key, is_escaped },
                };
                end
            }
            State::RemovedWord => match byte {
                b',' | b'}' | b']' | b' ' | b'\t' | b'\n' | b'\r' => {
                    self.end_removal(position, out)
                }
                _ => position + 1,
            },
            State::RemovedString { depth, is_escaped } => {
                let (end, state) = scan_string(data, position, is_escaped, is_events);
                self.state = match state {
                    StringScan::Continues { is_escaped } => {
                        State::RemovedString { depth, is_escaped }
                    }
                    StringScan::Ended if depth == 0 => return self.end_removal(end, out),
                    StringScan::Ended => State::Removed { depth },
                };
                end
            }
            State::Removed { depth } => {
                self.state = match byte {
                    b'"' => State::RemovedString {
                        depth,
                        is_escaped: false,
                    },
                    b'{' | b'[' => State::Removed { depth: depth + 1 },
                    b'}' | b']' if depth == 1 => return self.end_removal(position + 1, out),
                    b'}' | b']' => State::Removed { depth: depth - 1 },
                    _ => return position + 1,
                };
                position + 1
            }
        }
    }

    fn end_removal(&mut self, position: usize, out: &mut Splice<'_>) -> usize {
        out.leave_out(position);
        self.state = State::Between;
        position
    }

    fn on_structure(&mut self, byte: u8, position: usize, out: &mut Splice<'_>, counts: &Counts) {
        match byte {
            b' ' | b'\t' | b'\n' | b'\r' => {}
            b':' => self.next = self.current().child(self.key.text()),
            b',' => {
                self.next = Node::Other;
                self.is_key_next = true;
            }
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                self.next = Node::Other;
                self.is_key_next = false;
            }
            _ => self.on_value(byte, position, out, counts),
        }
    }

    /// The first byte of a value or a key, or a later byte of a number or a literal.
    fn on_value(&mut self, byte: u8, position: usize, out: &mut Splice<'_>, counts: &Counts) {
        let next = std::mem::take(&mut self.next);
        if next == Node::KvTransferParams && byte != b'n' {
            out.put(position..position, b"null");
            self.state = match byte {
                b'"' => State::RemovedString {
                    depth: 0,
                    is_escaped: false,
                },
                b'{' | b'[' => State::Removed { depth: 1 },
                _ => State::RemovedWord,
            };
            return;
        }
        match byte {
            b'"' => {
                let is_key = self.is_key_next && self.current() != Node::Other;
                self.is_key_next = false;
                self.key = Name::default();
                self.state = State::String {
                    is_key,
                    is_escaped: false,
                };
            }
            b'{' | b'[' => {
                let is_object = byte == b'{';
                if let Some(node) = self.path.get_mut(self.depth) {
                    *node = match (is_object, self.depth) {
                        (true, 0) => Node::Root,
                        (true, _) => next,
                        (false, _) => Node::Other,
                    };
                }
                self.depth += 1;
                self.is_key_next = is_object;
            }
            b'0'..=b'9' if let Some(count) = counts.of(next) => {
                out.put(position..position, count.as_bytes());
                self.state = State::RemovedWord;
            }
            _ => {}
        }
    }

    /// The meaning of the innermost open object.
    fn current(&self) -> Node {
        let innermost = self.depth.checked_sub(1);
        innermost
            .and_then(|index| self.path.get(index).copied())
            .unwrap_or_default()
    }
}

enum StringScan {
    Ended,
    Continues { is_escaped: bool },
}

/// Scans from inside a string to its end, or to an escape, or to the end of the piece. Stops at a line break of an
/// event stream.
fn scan_string(
    data: &[u8],
    position: usize,
    is_escaped: bool,
    is_events: bool,
) -> (usize, StringScan) {
    let from = if is_escaped { position + 1 } else { position };
    let continues = |is_escaped| StringScan::Continues { is_escaped };
    let rest = data.get(from..).unwrap_or_default();
    let found = if is_events {
        memchr3(b'"', b'\\', b'\n', rest)
    } else {
        memchr2(b'"', b'\\', rest)
    };
    match found {
        None => (data.len(), continues(false)),
        Some(found) => match rest[found] {
            b'"' => (from + found + 1, StringScan::Ended),
            b'\\' => (from + found + 1, continues(true)),
            // The line break itself is for `UsageRewriter`.
            _ => (from + found, continues(false)),
        },
    }
}
