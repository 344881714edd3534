//! A cursor over untrusted msgpack bytes: checks every length against the remaining bytes, reports the
//! position of errors, and skips values without recursion.

use rmp::Marker;

/// An error with its byte position and path (outermost last).
#[derive(Debug)]
pub(super) struct Fault {
    at: usize,
    what: String,
    path: Vec<String>,
}

pub(super) type Read<T> = Result<T, Box<Fault>>;

impl Fault {
    /// Names the field that was being read.
    pub(super) fn under(mut self: Box<Self>, field: &str) -> Box<Self> {
        self.path.push(field.to_owned());
        self
    }

    /// Names the field that was being read, by the engine's name for it.
    pub(super) fn under_name(self: Box<Self>, field: &[u8]) -> Box<Self> {
        self.under(&String::from_utf8_lossy(field))
    }

    pub(super) fn under_item(self: Box<Self>, index: usize) -> Box<Self> {
        self.under(&format!("[{index}]"))
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "byte {}", self.at)?;
        let mut separator = ", ";
        for step in self.path.iter().rev() {
            if step.starts_with('[') {
                separator = "";
            }
            write!(f, "{separator}{step}")?;
            separator = ".";
        }
        write!(f, ": {}", self.what)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub(super) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// The bytes from here to a later position of the same cursor.
    pub(super) fn until(&self, later: &Self) -> &'a [u8] {
        self.bytes.get(self.at..later.at).unwrap_or_default()
    }

    /// Takes as many bytes, if these agree with a test.
    #[inline]
    pub(super) fn take_if(
        &mut self,
        count: usize,
        agrees: impl FnOnce(&'a [u8]) -> bool,
    ) -> Option<&'a [u8]> {
        let taken = self.bytes[self.at..].get(..count)?;
        agrees(taken).then(|| {
            self.at += count;
            taken
        })
    }

    /// An error at the current position.
    pub(super) fn fault(&self, what: impl Into<String>) -> Box<Fault> {
        Box::new(Fault {
            at: self.at,
            what: what.into(),
            path: Vec::new(),
        })
    }

    fn expected(&self, what: &str) -> Box<Fault> {
        match self.bytes.get(self.at) {
            Some(&byte) => self.fault(format!(
                "expected {what}, found {}",
                kind(Marker::from_u8(byte))
            )),
            None => self.fault(format!("expected {what}, found the end")),
        }
    }

    fn peek(&self, expected: &str) -> Read<Marker> {
        match self.bytes.get(self.at) {
            Some(&byte) => Ok(Marker::from_u8(byte)),
            None => Err(self.expected(expected)),
        }
    }

    fn take(&mut self, count: usize) -> Read<&'a [u8]> {
        match self.bytes[self.at..].get(..count) {
            Some(taken) => {
                self.at += count;
                Ok(taken)
            }
            None => {
                let left = self.left();
                Err(self.fault(format!("{count} bytes are announced, {left} follow")))
            }
        }
    }

    /// `bytes` bytes after the marker, as a big-endian number.
    fn number(&mut self, bytes: usize) -> Read<u64> {
        self.at += 1;
        let taken = self.take(bytes)?;
        Ok(taken
            .iter()
            .fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    pub(super) fn is_nil(&self) -> bool {
        self.bytes.get(self.at) == Some(&0xc0)
    }

    pub(super) fn nil(&mut self) -> bool {
        let is_nil = self.is_nil();
        self.at += usize::from(is_nil);
        is_nil
    }

    pub(super) fn is_array(&self) -> bool {
        matches!(
            self.bytes.get(self.at).map(|&byte| Marker::from_u8(byte)),
            Some(Marker::FixArray(_) | Marker::Array16 | Marker::Array32)
        )
    }

    pub(super) fn is_map(&self) -> bool {
        matches!(
            self.bytes.get(self.at).map(|&byte| Marker::from_u8(byte)),
            Some(Marker::FixMap(_) | Marker::Map16 | Marker::Map32)
        )
    }

    pub(super) fn array(&mut self) -> Read<usize> {
        let len = match self.peek("a list")? {
            Marker::FixArray(len) => {
                self.at += 1;
                u64::from(len)
            }
            Marker::Array16 => self.number(2)?,
            Marker::Array32 => self.number(4)?,
            _ => return Err(self.expected("a list")),
        };
        self.followed(len)
    }

    pub(super) fn map(&mut self) -> Read<usize> {
        let len = match self.peek("a map")? {
            Marker::FixMap(len) => {
                self.at += 1;
                u64::from(len)
            }
            Marker::Map16 => self.number(2)?,
            Marker::Map32 => self.number(4)?,
            _ => return Err(self.expected("a map")),
        };
        self.followed(len)
    }

    /// Checks an announced length. Each entry takes at least a byte, so a list cannot be longer than the
    /// remaining bytes.
    fn followed(&self, len: u64) -> Read<usize> {
        match usize::try_from(len) {
            Ok(len) if len <= self.left() => Ok(len),
            _ => Err(self.fault(format!(
                "{len} entries are announced, {} bytes follow",
                self.left()
            ))),
        }
    }

    pub(super) fn text(&mut self) -> Read<&'a str> {
        let start = self.clone();
        std::str::from_utf8(self.name()?).map_err(|_| start.fault("the text is not UTF-8"))
    }

    /// A text that is only compared with known ones: its bytes, which may not be UTF-8.
    #[inline]
    pub(super) fn name(&mut self) -> Read<&'a [u8]> {
        // Names of fields and types are short.
        if let Some(&short @ 0xa0..=0xbf) = self.bytes.get(self.at) {
            let start = self.at + 1;
            let end = start + usize::from(short & 0x1f);
            if let Some(name) = self.bytes.get(start..end) {
                self.at = end;
                return Ok(name);
            }
        }
        let len = match self.peek("a text")? {
            Marker::FixStr(len) => {
                self.at += 1;
                u64::from(len)
            }
            Marker::Str8 => self.number(1)?,
            Marker::Str16 => self.number(2)?,
            Marker::Str32 => self.number(4)?,
            _ => return Err(self.expected("a text")),
        };
        let len = self.followed(len)?;
        self.take(len)
    }

    /// An integer of 8 bytes, as most hashes are, if one is next.
    #[inline]
    pub(super) fn u64(&mut self) -> Option<u64> {
        let [0xcf, bytes @ ..] = &self.bytes[self.at..] else {
            return None;
        };
        let value = u64::from_be_bytes(*bytes.first_chunk()?);
        self.at += 9;
        Some(value)
    }

    /// A byte string; `None` if another type is next.
    pub(super) fn blob(&mut self) -> Read<Option<&'a [u8]>> {
        let len = match self.peek("bytes")? {
            Marker::Bin8 => self.number(1)?,
            Marker::Bin16 => self.number(2)?,
            Marker::Bin32 => self.number(4)?,
            _ => return Ok(None),
        };
        let len = self.followed(len)?;
        self.take(len).map(Some)
    }

    /// Any integer from -2^63 to 2^64 - 1.
    pub(super) fn integer(&mut self) -> Read<i128> {
        let marker = self.peek("an integer")?;
        Ok(match marker {
            Marker::FixPos(value) => {
                self.at += 1;
                i128::from(value)
            }
            Marker::FixNeg(value) => {
                self.at += 1;
                i128::from(value)
            }
            Marker::U8 => i128::from(self.number(1)?),
            Marker::U16 => i128::from(self.number(2)?),
            Marker::U32 => i128::from(self.number(4)?),
            Marker::U64 => i128::from(self.number(8)?),
            Marker::I8 => i128::from(self.number(1)? as i8),
            Marker::I16 => i128::from(self.number(2)? as i16),
            Marker::I32 => i128::from(self.number(4)? as i32),
            Marker::I64 => i128::from(self.number(8)? as i64),
            _ => return Err(self.expected("an integer")),
        })
    }

    pub(super) fn u32(&mut self) -> Read<u32> {
        let start = self.clone();
        let value = self.integer()?;
        u32::try_from(value).map_err(|_| start.fault(format!("{value} does not fit in 32 bits")))
    }

    /// A list of small numbers. Token ids are the bulk of all events, so their usual encodings have a fast
    /// path.
    pub(super) fn u32s(&mut self) -> Read<Vec<u32>> {
        let len = self.array()?;
        // `array` checked the length, so this is at most four times the message.
        let mut numbers = vec![0; len];
        let mut read = 0;
        let mut rest = &self.bytes[self.at..];
        while read < len {
            // Most are of two bytes, many in a row.
            let (row, _) = rest.as_chunks::<3>();
            let mut of_two_bytes = 0;
            for (number, [marker, high, low]) in numbers[read..].iter_mut().zip(row) {
                if *marker != 0xcd {
                    break;
                }
                *number = u32::from(u16::from_be_bytes([*high, *low]));
                of_two_bytes += 1;
            }
            read += of_two_bytes;
            rest = &rest[3 * of_two_bytes..];
            let Some(number) = numbers.get_mut(read) else {
                break;
            };
            (*number, rest) = match rest {
                [small @ 0..=0x7f, rest @ ..] => (u32::from(*small), rest),
                [0xce, a, b, c, d, rest @ ..] => (u32::from_be_bytes([*a, *b, *c, *d]), rest),
                _ => {
                    self.at = self.bytes.len() - rest.len();
                    let number = self.u32().map_err(|fault| fault.under_item(read))?;
                    (number, &self.bytes[self.at..])
                }
            };
            read += 1;
        }
        self.at = self.bytes.len() - rest.len();
        Ok(numbers)
    }

    pub(super) fn float(&mut self) -> Read<f64> {
        match self.peek("a number")? {
            Marker::F64 => self.number(8).map(f64::from_bits),
            Marker::F32 => self
                .number(4)
                .map(|bits| f64::from(f32::from_bits(bits as u32))),
            _ => self
                .integer()
                .map(|value| value as f64)
                .map_err(|_| self.expected("a number")),
        }
    }

    /// Skips one value of any depth, and returns its bytes.
    pub(super) fn skip(&mut self) -> Read<&'a [u8]> {
        let start = self.at;
        // Each value takes at least a byte, so this ends.
        let mut values: u64 = 1;
        while values > 0 {
            values -= 1;
            let bytes = match self.peek("a value")? {
                Marker::FixPos(_)
                | Marker::FixNeg(_)
                | Marker::Null
                | Marker::True
                | Marker::False => {
                    self.at += 1;
                    0
                }
                Marker::U8 | Marker::I8 => 1 + 1,
                Marker::U16 | Marker::I16 => 1 + 2,
                Marker::U32 | Marker::I32 | Marker::F32 => 1 + 4,
                Marker::U64 | Marker::I64 | Marker::F64 => 1 + 8,
                Marker::FixExt1 => 2 + 1,
                Marker::FixExt2 => 2 + 2,
                Marker::FixExt4 => 2 + 4,
                Marker::FixExt8 => 2 + 8,
                Marker::FixExt16 => 2 + 16,
                Marker::FixStr(len) => 1 + u64::from(len),
                Marker::Str8 | Marker::Bin8 => self.number(1)?,
                Marker::Str16 | Marker::Bin16 => self.number(2)?,
                Marker::Str32 | Marker::Bin32 => self.number(4)?,
                Marker::Ext8 => 1 + self.number(1)?,
                Marker::Ext16 => 1 + self.number(2)?,
                Marker::Ext32 => 1 + self.number(4)?,
                Marker::FixArray(_) | Marker::Array16 | Marker::Array32 => {
                    values += self.array()? as u64;
                    0
                }
                Marker::FixMap(_) | Marker::Map16 | Marker::Map32 => {
                    values += 2 * self.map()? as u64;
                    0
                }
                Marker::Reserved => return Err(self.expected("a value")),
            };
            let bytes = self.followed(bytes)?;
            self.take(bytes)?;
        }
        Ok(&self.bytes[start..self.at])
    }
}

fn kind(marker: Marker) -> &'static str {
    match marker {
        Marker::FixPos(_)
        | Marker::FixNeg(_)
        | Marker::U8
        | Marker::U16
        | Marker::U32
        | Marker::U64
        | Marker::I8
        | Marker::I16
        | Marker::I32
        | Marker::I64 => "an integer",
        Marker::F32 | Marker::F64 => "a fraction",
        Marker::Null => "nothing (nil)",
        Marker::True | Marker::False => "true or false",
        Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32 => "a text",
        Marker::Bin8 | Marker::Bin16 | Marker::Bin32 => "bytes",
        Marker::FixArray(_) | Marker::Array16 | Marker::Array32 => "a list",
        Marker::FixMap(_) | Marker::Map16 | Marker::Map32 => "a map",
        Marker::FixExt1
        | Marker::FixExt2
        | Marker::FixExt4
        | Marker::FixExt8
        | Marker::FixExt16
        | Marker::Ext8
        | Marker::Ext16
        | Marker::Ext32 => "an extension",
        Marker::Reserved => "a byte that begins no value",
    }
}
