//! Where in JSON that comes in pieces, cut anywhere, the last piece ended: within a line of a stream, and within a name. Pure.

/// Lines of an event stream that contain JSON begin with this field name.
const FIELD: &[u8] = b"data:";

/// No name that is looked for is longer.
const MAX_NAME_BYTES: usize = "cache_creation_input_tokens".len();

/// The position within a line of an event stream, or within a whole answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Line {
    /// So many bytes of `data:` have come.
    Begin(usize),
    Json,
    /// In what is not read: another line, or an answer that is no JSON.
    Other,
}

impl Line {
    /// The position behind one more byte.
    pub(super) fn after(self, byte: u8) -> Self {
        match self {
            Self::Begin(matched) if byte != FIELD[matched] => Self::Other,
            Self::Begin(matched) if matched + 1 == FIELD.len() => Self::Json,
            Self::Begin(matched) => Self::Begin(matched + 1),
            Self::Json | Self::Other => self,
        }
    }
}

/// The name of a member, as far as it has come.
#[derive(Debug, Default)]
pub(super) struct Name {
    bytes: [u8; MAX_NAME_BYTES],
    length: usize,
    /// It is too long or has escapes: none such is looked for.
    is_other: bool,
}

impl Name {
    pub(super) fn push(&mut self, part: &[u8]) {
        let end = self.length + part.len();
        match self.bytes.get_mut(self.length..end) {
            Some(free) => {
                free.copy_from_slice(part);
                self.length = end;
            }
            None => self.is_other = true,
        }
    }

    pub(super) fn on_escape(&mut self) {
        self.is_other = true;
    }

    /// Empty for one that is too long or has escapes.
    pub(super) fn text(&self) -> &[u8] {
        if self.is_other {
            b""
        } else {
            &self.bytes[..self.length]
        }
    }
}
