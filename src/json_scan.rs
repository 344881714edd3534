//! Finds where the values of a JSON text begin and end. Pure.
//!
//! It takes what `serde_json` takes, and says nothing of what is wrong with any other text.

use std::borrow::Cow;

use memchr::memchr2;
use serde::Deserialize;
use smallvec::SmallVec;

/// Strings up to about this length are searched eight bytes at a time; the rest of a longer one by a search that takes longer
/// to begin.
const SHORT_BYTES: usize = 32;

/// A JSON string that `serde_json` reads, borrowed from the text where it has no escapes.
#[derive(Debug, Deserialize)]
#[serde(transparent)]
pub struct JsonString<'a>(#[serde(borrow)] pub Cow<'a, str>);

/// A text and a position in it. `CHECKS`: the text may be anything; otherwise it was parsed before, and what is in its strings
/// is only searched for their ends.
#[derive(Debug)]
pub struct Scan<'a, const CHECKS: bool> {
    text: &'a str,
    at: usize,
}

impl<'a, const CHECKS: bool> Scan<'a, CHECKS> {
    #[must_use]
    pub fn new(text: &'a str) -> Self {
        Self { text, at: 0 }
    }

    /// `None` if the bytes are no text.
    #[must_use]
    pub fn of_bytes(text: &'a [u8]) -> Option<Self> {
        // Several times as fast as the standard library, which a long body shows.
        simdutf8::basic::from_utf8(text).ok().map(Self::new)
    }

    /// The elements of a list, each read by `read`.
    pub fn elements<T>(&mut self, read: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let mut elements = Vec::new();
        self.each_element(|scan| {
            elements.push(read(scan)?);
            Some(())
        })?;
        Some(elements)
    }

    /// Has `read` take each element of a list.
    #[inline]
    pub fn each_element(&mut self, mut read: impl FnMut(&mut Self) -> Option<()>) -> Option<()> {
        let mut has_next = self.open_list()?;
        while has_next {
            read(self)?;
            has_next = self.next_element()?;
        }
        Some(())
    }

    /// To the first element of the list that begins here. False if it has none: then to what follows the list.
    #[inline]
    pub fn open_list(&mut self) -> Option<bool> {
        self.expect(b'[')?;
        let is_empty = self.next()? == b']';
        self.at += usize::from(is_empty);
        Some(!is_empty)
    }

    /// From the end of an element of a list to the next one. False if there is none: then to what follows the list.
    #[inline]
    pub fn next_element(&mut self) -> Option<bool> {
        self.is_last(b']').map(|is_last| !is_last)
    }

    /// Calls `on` with the name and the value of each member of the object that is all of the text.
    pub fn whole_object(mut self, on: impl FnMut(Cow<'a, str>, &'a str)) -> Option<()> {
        self.object(on)?;
        self.is_over().then_some(())
    }

    /// The elements, each read by `read`, of the list that is all of the text.
    pub fn whole_list<T>(mut self, read: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let elements = self.elements(read)?;
        self.is_over().then_some(elements)
    }

    /// Calls `on` with the name and the value of each member of an object.
    #[inline]
    pub fn object(&mut self, mut on: impl FnMut(Cow<'a, str>, &'a str)) -> Option<()> {
        self.each_member(|scan, name| {
            let value = scan.value()?;
            on(name, value);
            Some(())
        })
    }

    /// Has `read` take the value of each member of an object, given its name.
    #[inline]
    pub fn each_member(
        &mut self,
        mut read: impl FnMut(&mut Self, Cow<'a, str>) -> Option<()>,
    ) -> Option<()> {
        self.expect(b'{')?;
        if self.next()? == b'}' {
            self.at += 1;
            return Some(());
        }
        loop {
            self.next().filter(|byte| *byte == b'"')?;
            let name = self.text()?;
            self.open_value()?;
            read(self, name)?;
            if self.is_last(b'}')? {
                return Some(());
            }
        }
    }

    /// From behind the name of a member of an object to its value.
    #[inline]
    pub fn open_value(&mut self) -> Option<()> {
        self.expect(b':')?;
        self.next().map(drop)
    }

    /// From behind a member of an object to behind the object.
    pub fn skip_rest_of_object(&mut self) -> Option<()> {
        while !self.is_last(b'}')? {
            self.skip_name(b'}')?;
            self.value()?;
        }
        Some(())
    }

    /// The string that begins here, with its quotes, and whether it has escapes.
    #[inline]
    pub fn string(&mut self) -> Option<(&'a str, bool)> {
        let begin = self.at;
        let has_escapes = self.skip_string()?;
        Some((self.text.get(begin..self.at)?, has_escapes))
    }

    /// The characters of the string that begins here. Borrowed from the text if it has no escapes.
    #[inline]
    pub fn text(&mut self) -> Option<Cow<'a, str>> {
        let (string, has_escapes) = self.string()?;
        if has_escapes {
            return unescaped(string);
        }
        string.get(1..string.len() - 1).map(Cow::Borrowed)
    }

    /// The value that begins here.
    pub fn value(&mut self) -> Option<&'a str> {
        let begin = self.at;
        match self.first_byte()? {
            b'{' | b'[' => self.skip_nested()?,
            _ => self.skip_scalar()?,
        }
        self.text.get(begin..self.at)
    }

    /// What was not read yet.
    pub fn rest(&self) -> &'a str {
        self.text.get(self.at..).unwrap_or_default()
    }

    /// Whether nothing follows.
    pub fn is_over(&mut self) -> bool {
        self.skip_space();
        self.at == self.text.len()
    }

    fn skip_scalar(&mut self) -> Option<()> {
        match self.first_byte()? {
            b'"' => self.skip_string().map(drop),
            b't' => self.skip_word(b"true"),
            b'f' => self.skip_word(b"false"),
            b'n' => self.skip_word(b"null"),
            b'-' | b'0'..=b'9' => self.skip_number(),
            _ => None,
        }
    }

    /// Over a list or an object, without recursion: it may have any number of levels.
    fn skip_nested(&mut self) -> Option<()> {
        // The brackets that end what is open.
        let mut ends: SmallVec<[u8; 64]> = SmallVec::new();
        loop {
            match self.first_byte()? {
                begin @ (b'{' | b'[') => {
                    let end = if begin == b'{' { b'}' } else { b']' };
                    self.at += 1;
                    if self.next()? != end {
                        ends.push(end);
                        self.skip_name(end)?;
                        continue;
                    }
                    self.at += 1;
                }
                _ => self.skip_scalar()?,
            }
            // Behind a value.
            loop {
                let Some(end) = ends.last().copied() else {
                    return Some(());
                };
                if !self.is_last(end)? {
                    self.skip_name(end)?;
                    break;
                }
                ends.pop();
            }
        }
    }

    /// To the value of a member of an object, which ends with a brace; the elements of a list have no name.
    #[inline]
    fn skip_name(&mut self, end: u8) -> Option<()> {
        if end == b'}' {
            self.first_byte().filter(|byte| *byte == b'"')?;
            self.skip_string()?;
            self.open_value()?;
        }
        Some(())
    }

    #[inline]
    fn skip_word<const N: usize>(&mut self, word: &[u8; N]) -> Option<()> {
        let found = self.text.as_bytes().get(self.at..)?.first_chunk::<N>()?;
        self.at += N;
        (found == word).then_some(())
    }

    fn skip_number(&mut self) -> Option<()> {
        if self.first_byte() == Some(b'-') {
            self.at += 1;
        }
        match self.first_byte()? {
            b'0' => self.at += 1,
            b'1'..=b'9' => self.skip_digits()?,
            _ => return None,
        }
        if self.first_byte() == Some(b'.') {
            self.at += 1;
            self.skip_digits()?;
        }
        if let Some(b'e' | b'E') = self.first_byte() {
            self.at += 1;
            if let Some(b'+' | b'-') = self.first_byte() {
                self.at += 1;
            }
            self.skip_digits()?;
        }
        Some(())
    }

    /// At least one digit.
    fn skip_digits(&mut self) -> Option<()> {
        let begin = self.at;
        while let Some(b'0'..=b'9') = self.first_byte() {
            self.at += 1;
        }
        (self.at > begin).then_some(())
    }

    /// From its first quote to behind its last. Returns whether it has escapes.
    fn skip_string(&mut self) -> Option<bool> {
        let bytes = self.text.as_bytes();
        let mut has_escapes = false;
        self.at += 1;
        loop {
            self.at += plain_length::<CHECKS>(bytes.get(self.at..)?)?;
            match bytes.get(self.at)? {
                b'"' => {
                    self.at += 1;
                    return Some(has_escapes);
                }
                b'\\' => {
                    has_escapes = true;
                    self.at += match bytes.get(self.at + 1)? {
                        _ if !CHECKS => 2,
                        b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => 2,
                        b'u' => {
                            let digits = bytes.get(self.at + 2..self.at + 6)?;
                            digits.iter().all(u8::is_ascii_hexdigit).then_some(6)?
                        }
                        _ => return None,
                    };
                }
                // A control character.
                _ => return None,
            }
        }
    }

    /// Whether the list or object ends here, with `end`, rather than going on.
    #[inline]
    fn is_last(&mut self, end: u8) -> Option<bool> {
        let next = self.next()?;
        self.at += 1;
        match next {
            b',' => {
                self.next()?;
                Some(false)
            }
            next if next == end => Some(true),
            _ => None,
        }
    }

    #[inline]
    fn expect(&mut self, wanted: u8) -> Option<()> {
        let found = self.next()?;
        self.at += 1;
        (found == wanted).then_some(())
    }

    /// The next byte that is no space, without taking it.
    #[inline]
    fn next(&mut self) -> Option<u8> {
        self.skip_space();
        self.first_byte()
    }

    #[inline]
    fn skip_space(&mut self) {
        while let Some(b' ' | b'\n' | b'\t' | b'\r') = self.first_byte() {
            self.at += 1;
        }
    }

    /// The first byte of what was not read yet.
    #[inline]
    pub fn first_byte(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }
}

#[cold]
fn unescaped<'a>(string: &str) -> Option<Cow<'a, str>> {
    serde_json::from_str(string).ok().map(Cow::Owned)
}

/// The number of bytes of a string before its end or its first escape. `None` if the text ends before.
#[must_use]
pub fn plain_string(text: &[u8]) -> Option<usize> {
    plain_length::<false>(text)
}

/// The number of bytes before the first quote or backslash, or control character if `CHECKS`. `None` only if there is none.
#[inline]
fn plain_length<const CHECKS: bool>(text: &[u8]) -> Option<usize> {
    let mut at = 0;
    while at < SHORT_BYTES {
        let Some(word) = text.get(at..at + 8).and_then(<[u8]>::first_chunk) else {
            let is_special = |byte: &u8| matches!(byte, b'"' | b'\\') || CHECKS && *byte < b' ';
            let rest = text.get(at..)?.iter().position(is_special)?;
            return Some(at + rest);
        };
        let special = special_bytes::<CHECKS>(u64::from_le_bytes(*word));
        if special != 0 {
            return Some(at + special.trailing_zeros() as usize / 8);
        }
        at += 8;
    }
    let rest = &text[at..];
    let end = memchr2(b'"', b'\\', rest)?;
    if CHECKS {
        // Without a branch for each byte, so that many are compared at a time.
        let lowest = rest[..end]
            .iter()
            .fold(u8::MAX, |lowest, byte| lowest.min(*byte));
        if lowest < b' ' {
            let control = rest[..end].iter().position(|byte| *byte < b' ')?;
            return Some(at + control);
        }
    }
    Some(at + end)
}

/// The high bit of each byte that is a quote or a backslash, or a control character if `CHECKS`; maybe of bytes above such a
/// one, and of none else.
#[inline]
fn special_bytes<const CHECKS: bool>(word: u64) -> u64 {
    const LOW: u64 = 0x0101_0101_0101_0101;
    // A byte of ASCII that is below `limit` gets its high bit, and may lend to the next.
    let below = |word: u64, limit: u8| word.wrapping_sub(LOW * u64::from(limit));
    let quote = below(word ^ (LOW * u64::from(b'"')), 1);
    let backslash = below(word ^ (LOW * u64::from(b'\\')), 1);
    let control = if CHECKS { below(word, b' ') } else { 0 };
    (quote | backslash | control) & !word & (LOW << 7)
}

/// Whether a text needs no escapes in a JSON string.
#[inline]
pub fn is_plain(text: &[u8]) -> bool {
    let (words, rest) = text.as_chunks::<8>();
    let mut last = [b' '; 8];
    for (to, from) in last.iter_mut().zip(rest) {
        *to = *from;
    }
    words
        .iter()
        .chain([&last])
        .all(|word| special_bytes::<true>(u64::from_le_bytes(*word)) == 0)
}

/// The text with U+FFFD for each escaped surrogate that is not one of a pair; `None` if there is none. Python engines write
/// them, and read none: a text that has one cannot be sent back.
pub fn without_lone_surrogates(text: &str) -> Option<String> {
    let has = |escape: &[u8]| memchr::memmem::find(text.as_bytes(), escape).is_some();
    if !has(br"\ud") && !has(br"\uD") {
        return None;
    }
    let unit = |at: usize| {
        let digits = text.get(at..at + 6)?.strip_prefix("\\u")?;
        u16::from_str_radix(digits, 16).ok()
    };
    let mut out = String::with_capacity(text.len());
    let (mut copied, mut from) = (0, 0);
    while let Some(found) = memchr::memchr(b'\\', &text.as_bytes()[from..]) {
        let at = from + found;
        from = match (unit(at), unit(at + 6)) {
            (Some(0xd800..=0xdbff), Some(0xdc00..=0xdfff)) => at + 12,
            (Some(0xd800..=0xdfff), _) => {
                out.push_str(&text[copied..at]);
                out.push_str("\\ufffd");
                copied = at + 6;
                copied
            }
            // What is escaped may be a backslash.
            _ => at + 2,
        };
        if from >= text.len() {
            break;
        }
    }
    if copied == 0 {
        return None;
    }
    out.push_str(&text[copied..]);
    Some(out)
}

#[cfg(test)]
mod tests;
