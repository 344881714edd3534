//! A JSON object as slices of its own text, so that what is only passed on is never rebuilt. Pure.

use std::borrow::Cow;
use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use smallvec::SmallVec;

/// An object's members in their order. Of those with the same name the last one counts, as it does for
/// engines; the others are dropped.
#[derive(Clone, Debug, Default)]
pub(super) struct Members<'a>(SmallVec<[(Cow<'a, str>, &'a str); 6]>);

/// A string that borrows from the text where it has no escapes.
#[derive(Deserialize)]
#[serde(transparent)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'a> Members<'a> {
    /// An error where `text` is not one JSON object.
    pub(super) fn parse(text: &'a str) -> serde_json::Result<Self> {
        serde_json::from_str(text)
    }

    /// A member's value as it is written; `None` also where it is null.
    pub(super) fn get(&self, name: &str) -> Option<&'a str> {
        let found = self.0.iter().rev().find(|(key, _)| key == name);
        found.map(|(_, value)| *value).filter(|it| *it != "null")
    }

    /// A member that is a string.
    pub(super) fn text(&self, name: &str) -> Option<Cow<'a, str>> {
        self.get(name).and_then(text)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &'a str)> {
        self.0.iter().map(|(name, value)| (&**name, *value))
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Members<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members<'de>, A::Error> {
                let mut members = Members::default();
                while let Some((Text(name), value)) =
                    map.next_entry::<Text<'de>, &'de RawValue>()?
                {
                    // Quadratic in the names, of which real bodies have a few dozen.
                    const LOOKED_AT: usize = 64;
                    if members.0.len() < LOOKED_AT {
                        members.0.retain(|(known, _)| *known != name);
                    }
                    members.0.push((name, value.get()));
                }
                Ok(members)
            }
        }
        deserializer.deserialize_map(V)
    }
}

/// The items of a JSON list as they are written; `None` where it is none.
pub(super) fn list(text: &str) -> Option<Vec<&str>> {
    let items: Vec<&RawValue> = serde_json::from_str(text).ok()?;
    Some(items.into_iter().map(RawValue::get).collect())
}

/// The objects of a JSON list, read in one go; `None` where it is none, or has anything else in it.
pub(super) fn objects(text: &str) -> Option<Vec<Members<'_>>> {
    serde_json::from_str(text).ok()
}

/// A JSON string's characters; `None` where it is none.
pub(super) fn text(raw: &str) -> Option<Cow<'_, str>> {
    let Text(text) = serde_json::from_str(raw).ok()?;
    Some(text)
}

/// A JSON string without its quotes, escapes as they are: such pieces can be joined.
pub(super) fn escaped(raw: &str) -> Option<&str> {
    raw.strip_prefix('"')?.strip_suffix('"')
}

/// Writes a text as a JSON string.
pub(super) fn put_text(out: &mut Vec<u8>, text: &str) {
    let bytes = text.as_bytes();
    // Names and ids need no escapes, and are most of what is written.
    if bytes.len() <= 64
        && bytes
            .iter()
            .all(|it| *it >= b' ' && !matches!(it, b'"' | b'\\'))
    {
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
pub(super) fn put_string(out: &mut Vec<u8>, name: &str, text: &str) {
    put(out, name, "");
    put_text(out, text);
}

/// Writes `,"name":value`, without the comma at an object's or a list's beginning.
pub(super) fn put(out: &mut Vec<u8>, name: &str, value: &str) {
    out.reserve(name.len() + value.len() + 4);
    if !matches!(out.last(), Some(b'{' | b'[') | None) {
        out.push(b',');
    }
    put_text(out, name);
    out.push(b':');
    out.extend_from_slice(value.as_bytes());
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
    fn what_is_no_object_is_an_error() {
        for text in ["[]", "1", "", "{", "{}x", r#"{"a"}"#] {
            assert!(Members::parse(text).is_err(), "{text}");
        }
    }
}
