//! Finds objects by the names of their members in one JSON text, cut anywhere. Brackets and numbers are passed over: the braces
//! alone say how deep a name stands. Pure.

use memchr::memchr3;

use crate::json_scan::plain_string;
use crate::relay::answer::cut_json::Name;

/// A longer object is no usage.
const USAGE_BYTES_MAX: usize = 4_096;

/// Where in the text the last piece ended.
#[derive(Debug, Default)]
pub(super) struct MemberSearch {
    /// Braces that are open.
    depth: u32,
    /// The member of the outermost object that is open is one that has the usage of a stream's event.
    is_in_holder: bool,
    is_in_string: bool,
    /// The piece ended with a backslash.
    is_escaped: bool,
    /// The part of the open string that came in earlier pieces.
    name: Name,
    /// The last string, if its object is looked for, and whether a colon followed.
    named: Option<(Named, bool)>,
    /// A brace was closed that was not open.
    has_excess: bool,
    /// The depth at which the open usage began, and what earlier pieces had of it.
    open: Option<(u32, Vec<u8>)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Named {
    Usage,
    /// Of an event that has an answer: `response`, `message`.
    Holder,
}

impl MemberSearch {
    /// Begins within an object of the outermost level.
    pub(super) fn in_object() -> Self {
        Self {
            depth: 1,
            ..Self::default()
        }
    }

    /// Whether all braces are closed that were open, and no others.
    pub(super) fn is_over(&self) -> bool {
        self.depth == 0 && !self.has_excess
    }

    /// Takes the next piece. `on_usage` gets each object of usage and the position behind it. `is_other`: the answer is that
    /// of an API that the router does not know.
    pub(super) fn read(
        &mut self,
        piece: &[u8],
        is_other: bool,
        mut on_usage: impl FnMut(&[u8], usize),
    ) {
        let (mut at, mut begin) = (0, 0);
        while at < piece.len() {
            if self.is_in_string {
                at = self.read_string(piece, at, is_other);
                continue;
            }
            let mut value_of = None;
            if let Some((named, has_colon)) = self.named {
                match piece[at] {
                    b' ' | b'\t' | b'\r' | b'\n' => {
                        at += 1;
                        continue;
                    }
                    b':' if !has_colon => {
                        self.named = Some((named, true));
                        at += 1;
                        continue;
                    }
                    _ => self.named = None,
                }
                value_of = Some(named).filter(|_| has_colon && piece[at] == b'{');
            }
            let Some(next) = next_special(&piece[at..]) else {
                break;
            };
            at += next;
            match piece[at] {
                b'"' => {
                    self.is_in_string = true;
                    self.name = Name::default();
                }
                b'{' => {
                    match value_of {
                        Some(Named::Usage) => {
                            self.open = Some((self.depth, Vec::new()));
                            begin = at;
                        }
                        Some(Named::Holder) => self.is_in_holder = true,
                        None => {}
                    }
                    self.depth += 1;
                }
                _ => {
                    self.has_excess |= self.depth == 0;
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth <= 1 {
                        self.is_in_holder = false;
                    }
                    let closed = self.open.take_if(|(depth, _)| *depth == self.depth);
                    if let Some((_, mut whole)) = closed {
                        if whole.is_empty() {
                            on_usage(&piece[begin..=at], at + 1);
                        } else {
                            whole.extend_from_slice(&piece[..=at]);
                            on_usage(&whole, at + 1);
                        }
                    }
                }
            }
            at += 1;
        }
        self.keep_open(&piece[begin.min(piece.len())..]);
    }

    /// Keeps the part of an open usage for the next piece.
    fn keep_open(&mut self, part: &[u8]) {
        if let Some((_, earlier)) = &mut self.open {
            if earlier.len() + part.len() <= USAGE_BYTES_MAX {
                earlier.extend_from_slice(part)
            } else {
                self.open = None
            }
        }
    }

    /// From a position within a string to behind its end. Returns the next position.
    fn read_string(&mut self, piece: &[u8], from: usize, is_other: bool) -> usize {
        let is_candidate =
            self.open.is_none() && (self.depth == 1 || self.depth == 2 && self.is_in_holder);
        let mut at = from + usize::from(std::mem::take(&mut self.is_escaped));
        loop {
            let rest = piece.get(at..).unwrap_or_default();
            let Some(next) = plain_string(rest) else {
                if is_candidate {
                    self.name.push(piece.get(from..).unwrap_or_default());
                }
                return piece.len();
            };
            at += next + 1;
            if piece[at - 1] == b'"' {
                self.is_in_string = false;
                if is_candidate {
                    self.name.push(&piece[from..at - 1]);
                    self.named = self.looked_for(is_other).map(|named| (named, false));
                }
                return at;
            }
            self.name.on_escape();
            if at == piece.len() {
                self.is_escaped = true;
                return at;
            }
            at += 1;
        }
    }

    /// What the name that has come stands before, if that is looked for.
    fn looked_for(&self, is_other: bool) -> Option<Named> {
        match self.name.text() {
            b"usage" => Some(Named::Usage),
            b"meta_info" if is_other => Some(Named::Usage),
            b"response" | b"message" if self.depth == 1 => Some(Named::Holder),
            _ => None,
        }
    }
}

/// Most of them are near, but between those of a list of numbers there may be megabytes.
const NEAR: usize = 16;

/// The position of the next quote or brace.
fn next_special(text: &[u8]) -> Option<usize> {
    let is_special = |byte: &u8| matches!(byte, b'"' | b'{' | b'}');
    let near = text.iter().take(NEAR).position(is_special);
    near.or_else(|| Some(NEAR + memchr3(b'"', b'{', b'}', text.get(NEAR..)?)?))
}
