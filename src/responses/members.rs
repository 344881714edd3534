//! A JSON object as slices of its text, so that values that are only passed on are never rewritten. Pure.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserializer as _, Error as _, IgnoredAny, MapAccess, Visitor};
use smallvec::SmallVec;

use crate::json_scan::{JsonString, Scan, is_plain};

/// An object's members in order. If a name occurs twice the last one counts, as in engines; the others are
/// dropped.
#[derive(Clone, Debug, Default)]
pub(super) struct Members<'a> {
    all: SmallVec<[(Cow<'a, str>, &'a str); 6]>,
    /// A bit for each name, by its length and its ends: most names need not be looked for.
    names: u64,
}

impl<'a> Members<'a> {
    /// Fails if `text` is not one JSON object.
    pub(super) fn parse(text: &'a str) -> serde_json::Result<Self> {
        let mut members = Self::default();
        match Scan::<true>::new(text).whole_object(|name, value| members.push(name, value)) {
            Some(()) => Ok(members),
            None => Err(error_of(text)),
        }
    }

    /// The members of an object as bytes; `None` if they are not one JSON object.
    pub(super) fn of_bytes(json: &'a [u8]) -> Option<Self> {
        Self::parse(std::str::from_utf8(json).ok()?).ok()
    }

    /// Those of the object that begins here.
    pub(super) fn scan<const CHECKS: bool>(scan: &mut Scan<'a, CHECKS>) -> Option<Self> {
        let mut members = Self::default();
        scan.object(|name, value| members.push(name, value))?;
        Some(members)
    }

    /// A member's value as written; `None` if it is missing or null.
    #[inline]
    pub(super) fn get(&self, name: &str) -> Option<&'a str> {
        if self.names & name_bit(name) == 0 {
            return None;
        }
        self.find(name)
    }

    fn find(&self, name: &str) -> Option<&'a str> {
        let found = self.all.iter().rev().find(|(key, _)| key == name);
        found
            .map(|(_, value)| *value)
            .filter(|value| *value != "null")
    }

    /// The value of a member that is a string.
    pub(super) fn text(&self, name: &str) -> Option<Cow<'a, str>> {
        self.get(name).and_then(text)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &'a str)> {
        self.all.iter().map(|(name, value)| (&**name, *value))
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn push(&mut self, name: Cow<'a, str>, value: &'a str) {
        // Quadratic in the number of names, of which real bodies have a few dozen.
        const DEDUPLICATED_MAX: usize = 64;
        let bit = name_bit(&name);
        // Most objects have few members or many.
        if self.all.len() == self.all.inline_size() {
            self.all.reserve(MANY);
        }
        if self.names & bit != 0 && self.all.len() < DEDUPLICATED_MAX {
            self.all.retain(|(known, _)| *known != name);
        }
        self.names |= bit;
        self.all.push((name, value));
    }
}

/// Room for the members of an object that has more than a few.
const MANY: usize = 26;

/// The bit that stands for a name in a set of names: equal names have the same one, and different names may share one.
#[inline]
fn name_bit(name: &str) -> u64 {
    let ends = match name.as_bytes() {
        [] => 0,
        bytes @ [first, .., last] => {
            let middle = bytes[bytes.len() / 2];
            usize::from(*first) + 7 * usize::from(middle) + 13 * usize::from(*last)
        }
        [one] => usize::from(*one),
    };
    1 << ((ends + 3 * name.len()) % 64)
}

/// What is wrong with a text that is not one JSON object.
#[cold]
fn error_of(text: &str) -> serde_json::Error {
    struct Object;
    impl<'de> Visitor<'de> for Object {
        type Value = ();

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a JSON object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
            while map.next_entry::<String, IgnoredAny>()?.is_some() {}
            Ok(())
        }
    }
    let mut json = serde_json::Deserializer::from_str(text);
    let read = json.deserialize_map(Object).and_then(|()| json.end());
    read.err()
        .unwrap_or_else(|| serde_json::Error::custom("no JSON object"))
}

/// The items of a JSON list as written; `None` if it is not a list.
pub(super) fn list(text: &str) -> Option<Vec<&str>> {
    Scan::<true>::new(text).whole_list(Scan::value)
}

/// The items of a JSON list as bytes; `None` if they are not a list.
pub(super) fn list_of(json: &[u8]) -> Option<Vec<&str>> {
    list(std::str::from_utf8(json).ok()?)
}

/// The characters of a JSON string; `None` if it is not a string.
pub(super) fn text(raw: &str) -> Option<Cow<'_, str>> {
    if let Some(short) =
        escaped(raw).filter(|short| short.len() <= 64 && is_plain(short.as_bytes()))
    {
        return Some(Cow::Borrowed(short));
    }
    let JsonString(text) = serde_json::from_str(raw).ok()?;
    Some(text)
}

/// A JSON string without its quotes and with its escapes: such pieces can be concatenated.
pub(super) fn escaped(raw: &str) -> Option<&str> {
    raw.strip_prefix('"')?.strip_suffix('"')
}

/// Writes a text as a JSON string.
pub(super) fn put_text(out: &mut Vec<u8>, text: &str) {
    let bytes = text.as_bytes();
    // Names and ids, the most frequent texts, need no escapes.
    if bytes.len() <= 64 && is_plain(bytes) {
        out.reserve(bytes.len() + 2);
        out.push(b'"');
        out.extend_from_slice(bytes);
        out.push(b'"');
        return;
    }
    // Writing to memory cannot fail.
    let _ = serde_json::to_writer(out, text);
}

/// Writes a member whose value is a text.
pub(super) fn put_string(out: &mut Vec<u8>, name: &'static str, text: &str) {
    put(out, name, "");
    put_text(out, text);
}

/// Writes `,"name":value`; no comma at the start of an object or a list. The name needs no escapes.
#[inline]
pub(super) fn put(out: &mut Vec<u8>, name: &'static str, value: &str) {
    put_plain(out, name, value);
}

/// As [`put`], with a name that was read.
pub(super) fn put_read(out: &mut Vec<u8>, name: &str, value: &str) {
    if name.len() <= 64 && is_plain(name.as_bytes()) {
        return put_plain(out, name, value);
    }
    put_comma(out);
    put_text(out, name);
    out.push(b':');
    out.extend_from_slice(value.as_bytes());
}

fn put_plain(out: &mut Vec<u8>, name: &str, value: &str) {
    out.reserve(name.len() + value.len() + 4);
    put_comma(out);
    out.push(b'"');
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b"\":");
    out.extend_from_slice(value.as_bytes());
}

/// Writes the comma before a member or an item, unless it is the first one of an object or a list.
#[inline]
pub(super) fn put_comma(out: &mut Vec<u8>) {
    if !matches!(out.last(), Some(b'{' | b'[') | None) {
        out.push(b',');
    }
}

/// Writes a member whose value is a number.
pub(super) fn put_number(out: &mut Vec<u8>, name: &'static str, number: u64) {
    put(out, name, itoa::Buffer::new().format(number));
}

/// A JSON list of these items.
pub(super) fn array<'i>(items: impl Iterator<Item = &'i [u8]> + Clone) -> Vec<u8> {
    let bytes = items.clone().map(|item| item.len() + 1).sum::<usize>();
    let mut out = Vec::with_capacity(bytes + 2);
    out.push(b'[');
    for item in items {
        put_comma(&mut out);
        out.extend_from_slice(item);
    }
    out.push(b']');
    out
}

pub(super) fn quoted(text: &str) -> String {
    let mut out = Vec::with_capacity(text.len() + 2);
    put_text(&mut out, text);
    String::from_utf8(out).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_slices_of_the_text_in_their_order() {
        let members = Members::parse(r#"{ "b": [1,  2], "a\u0041": "x\n", "n": null }"#).unwrap();
        let all: Vec<(&str, &str)> = members.iter().collect();
        assert_eq!(all, [("b", "[1,  2]"), ("aA", r#""x\n""#), ("n", "null")]);
        assert_eq!(members.get("n"), None);
        assert_eq!(members.text("aA").unwrap(), "x\n");
    }

    #[test]
    fn the_last_member_of_a_name_counts() {
        let members = Members::parse(r#"{"a":1,"b":2,"\u0061":3}"#).unwrap();
        assert_eq!(members.get("a"), Some("3"));
        assert_eq!(members.len(), 2);
    }

    #[test]
    fn a_text_is_plain_unless_json_escapes_a_byte_of_it() {
        for byte in 0..=0x7f_u8 {
            let needs_escape = byte < b' ' || byte == b'"' || byte == b'\\';
            for at in 0..20 {
                let mut text = vec![b'~'; 20];
                text[at] = byte;
                assert_eq!(is_plain(&text), !needs_escape, "{byte} at {at}");
                assert_eq!(is_plain(&text[..=at]), !needs_escape, "{byte} at {at}");
            }
        }
        assert!(is_plain("é ü".as_bytes()) && is_plain(b""));
    }

    #[test]
    fn names_of_one_bit_are_different_names() {
        let (one, other) = ("abc", "cba");
        assert_eq!(name_bit("abca"), name_bit("abca"));
        let text = format!(r#"{{"{one}":1,"{other}":2,"{one}":3,"":4,"x":5,"":6}}"#);
        let members = Members::parse(&text).unwrap();
        let all: Vec<(&str, &str)> = members.iter().collect();
        assert_eq!(all, [(other, "2"), (one, "3"), ("x", "5"), ("", "6")]);
        let many: Vec<String> = (0..60).map(|n| format!(r#""m{n}":{n}"#)).collect();
        let text = format!("{{{},{}}}", many.join(","), many.join(","));
        assert_eq!(Members::parse(&text).unwrap().len(), 60);
    }

    #[test]
    fn a_text_that_is_not_an_object_is_an_error() {
        for text in ["[]", "1", "", "{", "{}x", r#"{"a"}"#] {
            assert!(Members::parse(text).is_err(), "{text}");
        }
    }
}
