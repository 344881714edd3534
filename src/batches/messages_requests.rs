//! Reads the body that creates a Message Batch, `{"requests":[{"custom_id":...,"params":{...}}]}`, piece by piece, and
//! makes the lines of an input file of it. Pure.
//!
//! Memory: one request, and a hash of each `custom_id`. The requests are checked as JSON; of what else is in the body
//! only the brackets and the strings are looked at.

use memchr::memchr2;

use super::custom_ids::CustomIds;
use super::line::{LineEndpoint, MAX_LINE_BYTES};
use crate::json_scan::Scan;

/// What a request's line has besides its own bytes, and some room.
const ENVELOPE_BYTES: u64 = 1_024;

/// Bytes of a request, so that its line is not too long.
const MAX_REQUEST_BYTES: usize = (MAX_LINE_BYTES - ENVELOPE_BYTES) as usize;

/// The member's name, with the quotes.
const REQUESTS: &[u8] = br#""requests""#;

/// The message of a client's error that says what is wrong with the body.
type Invalid = String;

fn no_json() -> Invalid {
    "the request body is not valid JSON".to_owned()
}

/// Where in the body the last byte was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// Before the body's object.
    Start,
    /// Among the members of the body's object.
    Members,
    /// In the value of a member that is not read, so many brackets deep.
    Skipped(u32),
    /// In the list of requests, between them. Whether a comma must come before the next.
    Requests {
        wants_comma: bool,
    },
    /// In a request, so many brackets deep.
    Request(u32),
    End,
}

/// Where in a string the last byte was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Text {
    Outside,
    Inside,
    /// Behind a backslash.
    Escape,
}

#[derive(Debug)]
pub struct RequestReader {
    max_requests: u32,
    at: At,
    text: Text,
    /// The last string among the members, with its quotes: a name if a colon follows. No more of it than a name that
    /// is looked for has.
    name: Vec<u8>,
    /// The request that is not complete yet.
    request: Vec<u8>,
    requests: u32,
    /// Whether the body has the member, with any value.
    has_member: bool,
    has_list: bool,
    custom_ids: CustomIds,
}

impl RequestReader {
    pub fn new(max_requests: u32) -> Self {
        Self {
            max_requests,
            at: At::Start,
            text: Text::Outside,
            name: Vec::new(),
            request: Vec::new(),
            requests: 0,
            has_member: false,
            has_list: false,
            custom_ids: CustomIds::default(),
        }
    }

    /// Reads the next bytes, and adds the lines of the requests that are complete to `lines`, each with a line break.
    pub fn push(&mut self, mut piece: &[u8], lines: &mut Vec<u8>) -> Result<(), Invalid> {
        while let Some(first) = piece.first() {
            let length = match self.text {
                Text::Inside => memchr2(b'"', b'\\', piece).unwrap_or(piece.len()).max(1),
                Text::Outside | Text::Escape => 1,
            };
            let (bytes, rest) = piece.split_at(length);
            piece = rest;
            if self.text == Text::Outside {
                self.on_structure(*first, lines)?;
            } else {
                self.on_text(bytes)?;
            }
        }
        Ok(())
    }

    /// The number of requests.
    pub fn finish(self) -> Result<u32, Invalid> {
        if self.at != At::End {
            return Err(no_json());
        }
        if !self.has_list {
            let message = if self.has_member {
                "requests: Input should be a list"
            } else {
                "requests: Field required"
            };
            return Err(message.to_owned());
        }
        if self.requests == 0 {
            return Err("requests: List should have at least 1 item".to_owned());
        }
        Ok(self.requests)
    }

    /// In a string: its first quote was read before.
    fn on_text(&mut self, bytes: &[u8]) -> Result<(), Invalid> {
        self.keep(bytes)?;
        self.text = match (self.text, bytes.first()) {
            (Text::Inside, Some(b'"')) => Text::Outside,
            (Text::Inside, Some(b'\\')) => Text::Escape,
            _ => Text::Inside,
        };
        Ok(())
    }

    /// Outside of strings.
    fn on_structure(&mut self, byte: u8, lines: &mut Vec<u8>) -> Result<(), Invalid> {
        if byte == b'"' {
            self.text = Text::Inside;
        }
        match (self.at, byte) {
            (At::Start | At::Members | At::End | At::Requests { .. }, byte)
                if byte.is_ascii_whitespace() => {}
            (At::Start, b'{') => self.at = At::Members,
            (At::Members, b'"') => {
                self.name.clear();
                self.keep(b"\"")?;
            }
            (At::Members, b'[') if self.name == REQUESTS => {
                if self.has_list {
                    return Err("requests: given twice".to_owned());
                }
                self.has_list = true;
                self.at = At::Requests { wants_comma: false };
            }
            (At::Members, b'{' | b'[') => self.at = At::Skipped(1),
            (At::Members, b'}') => self.at = At::End,
            (At::Members, b',') => self.name.clear(),
            (At::Members, b']') => return Err(no_json()),
            (At::Members, b':') => self.has_member |= self.name == REQUESTS,
            // A number, a word.
            (At::Members, _) => {}
            (At::Skipped(depth), _) => {
                let depth = deeper(depth, byte)?;
                self.at = if depth == 0 {
                    At::Members
                } else {
                    At::Skipped(depth)
                };
            }
            (At::Requests { wants_comma: true }, b',') => {
                self.at = At::Requests { wants_comma: false };
            }
            (At::Requests { .. }, b']') => {
                self.name.clear();
                self.at = At::Members;
            }
            (At::Requests { wants_comma: false }, b'{') => {
                if self.requests >= self.max_requests {
                    let max = self.max_requests;
                    return Err(format!("requests: List should have at most {max} items"));
                }
                self.at = At::Request(1);
                self.keep(b"{")?;
            }
            (At::Requests { wants_comma: false }, _) => {
                return Err(self.invalid("", "Input should be an object"));
            }
            (At::Request(depth), _) => {
                self.keep(&[byte])?;
                let depth = deeper(depth, byte)?;
                self.at = At::Request(depth);
                if depth == 0 {
                    self.on_request(lines)?;
                    self.at = At::Requests { wants_comma: true };
                }
            }
            (At::Start | At::End | At::Requests { wants_comma: true }, _) => {
                return Err(no_json());
            }
        }
        Ok(())
    }

    /// Keeps bytes of a request or of a name.
    fn keep(&mut self, bytes: &[u8]) -> Result<(), Invalid> {
        match self.at {
            At::Request(_) => {
                if self.request.len() + bytes.len() > MAX_REQUEST_BYTES {
                    let message = format!("Input should have at most {MAX_REQUEST_BYTES} bytes");
                    return Err(self.invalid("", &message));
                }
                self.request.extend_from_slice(bytes);
            }
            At::Members => {
                // One byte more than the name has, so that a longer one differs from it.
                let room = (REQUESTS.len() + 1).saturating_sub(self.name.len());
                let kept = bytes.get(..room).unwrap_or(bytes);
                self.name.extend_from_slice(kept);
            }
            At::Start | At::Skipped(_) | At::Requests { .. } | At::End => {}
        }
        Ok(())
    }

    fn on_request(&mut self, lines: &mut Vec<u8>) -> Result<(), Invalid> {
        let (mut custom_id, mut params) = (None, None);
        let scan = Scan::<true>::of_bytes(&self.request);
        let read = scan.and_then(|scan| {
            scan.whole_object(|name, value| match name.as_ref() {
                "custom_id" => custom_id = Some(value),
                "params" => params = Some(value),
                _ => {}
            })
        });
        if read.is_none() {
            return Err(self.invalid("", "the request is not valid JSON"));
        }
        let Some(custom_id) = custom_id else {
            return Err(self.invalid(".custom_id", "Field required"));
        };
        let Some(params) = params else {
            return Err(self.invalid(".params", "Field required"));
        };
        if !params.starts_with('{') {
            return Err(self.invalid(".params", "Input should be an object"));
        }
        // The pattern allows nothing that needs an escape.
        let text = custom_id
            .strip_prefix('"')
            .and_then(|text| text.strip_suffix('"'));
        let Some(id) = text.filter(|text| is_custom_id(text)) else {
            let message = "String should match pattern '^[a-zA-Z0-9_-]{1,64}$'";
            return Err(self.invalid(".custom_id", message));
        };
        if !self.custom_ids.insert(id) {
            let message = format!("Each request of a batch needs its own; `{id}` is there already");
            return Err(self.invalid(".custom_id", &message));
        }
        let head = format!(
            r#"{{"custom_id":"{id}","method":"POST","url":"{}","body":"#,
            LineEndpoint::Messages.path()
        );
        lines.extend_from_slice(head.as_bytes());
        // Strings have no line break that is not escaped, so all of them stand between values.
        let params = params.bytes().map(|byte| match byte {
            b'\n' | b'\r' => b' ',
            byte => byte,
        });
        lines.extend(params);
        lines.extend_from_slice(b"}\n");
        self.requests += 1;
        self.request.clear();
        Ok(())
    }

    /// Something is wrong with the request that is read, or with a member of it.
    fn invalid(&self, member: &str, message: &str) -> Invalid {
        format!("requests.{}{member}: {message}", self.requests)
    }
}

fn is_custom_id(id: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    (1..=64).contains(&id.len()) && id.bytes().all(is_allowed)
}

/// How many brackets are open after the byte.
fn deeper(depth: u32, byte: u8) -> Result<u32, Invalid> {
    match byte {
        b'{' | b'[' => depth.checked_add(1).ok_or_else(no_json),
        b'}' | b']' => Ok(depth.saturating_sub(1)),
        _ => Ok(depth),
    }
}

#[cfg(test)]
mod tests;
