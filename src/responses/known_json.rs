//! Splits JSON that was read as such before: stored items, and parts of a body. Pure.
//!
//! A long history is split on every turn. What is in its strings, nearly all of it, is only searched for their ends,
//! several times as fast as a parser that checks them.

use std::borrow::Cow;

use memchr::memchr2;

use super::members::{self, Members};

/// As [`members::objects`], of a text that is JSON. Of any other text the result may be anything.
pub(super) fn objects(text: &str) -> Option<Vec<Members<'_>>> {
    let mut scan = Scan { text, at: 0 };
    scan.elements(Scan::object)
        .or_else(|| members::objects(text))
}

/// As [`Members::parse`], of a text that is JSON.
pub(super) fn object(text: &str) -> serde_json::Result<Members<'_>> {
    let mut scan = Scan { text, at: 0 };
    let object = scan.object().filter(|_| scan.is_over());
    object.map_or_else(|| Members::parse(text), Ok)
}

/// As [`members::list`], of a text that is JSON.
pub(super) fn list(text: &str) -> Option<Vec<&str>> {
    let mut scan = Scan { text, at: 0 };
    scan.elements(Scan::value).or_else(|| members::list(text))
}

struct Scan<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Scan<'a> {
    /// The elements of a list, each read by `read`.
    fn elements<T>(&mut self, read: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let mut elements = Vec::new();
        self.expect(b'[')?;
        if self.next()? != b']' {
            loop {
                self.next()?;
                elements.push(read(self)?);
                if self.is_last(b']')? {
                    break;
                }
            }
        } else {
            self.at += 1;
        }
        self.is_over().then_some(elements)
    }

    /// Whether nothing follows.
    fn is_over(&mut self) -> bool {
        self.skip_space();
        self.at == self.text.len()
    }

    /// `None` also for what is rare: names with escapes.
    fn object(&mut self) -> Option<Members<'a>> {
        let mut members = Members::default();
        self.expect(b'{')?;
        if self.next()? == b'}' {
            self.at += 1;
            return Some(members);
        }
        loop {
            self.next().filter(|it| *it == b'"')?;
            let name = members::escaped(self.value()?)?;
            self.expect(b':')?;
            self.next()?;
            let value = self.value()?;
            if name.contains('\\') {
                return None;
            }
            members.push(Cow::Borrowed(name), value);
            if self.is_last(b'}')? {
                return Some(members);
            }
        }
    }

    /// The value that begins here.
    fn value(&mut self) -> Option<&'a str> {
        let (begin, bytes) = (self.at, self.text.as_bytes());
        let mut depth = 0;
        loop {
            match bytes.get(self.at)? {
                b'"' => self.skip_string()?,
                b'{' | b'[' => {
                    depth += 1;
                    self.at += 1;
                }
                b'}' | b']' if depth > 0 => {
                    depth -= 1;
                    self.at += 1;
                }
                // What ends a number or a word is not part of it.
                b'}' | b']' | b',' | b' ' | b'\n' | b'\t' | b'\r' if depth == 0 => break,
                _ => {
                    self.at += 1;
                    if depth == 0 {
                        continue;
                    }
                }
            }
            if depth == 0 {
                break;
            }
        }
        self.text.get(begin..self.at).filter(|it| !it.is_empty())
    }

    /// From its first quote to behind its last.
    fn skip_string(&mut self) -> Option<()> {
        let bytes = self.text.as_bytes();
        self.at += 1;
        loop {
            self.at += memchr2(b'"', b'\\', bytes.get(self.at..)?)?;
            if bytes[self.at] == b'"' {
                self.at += 1;
                return Some(());
            }
            self.at += 2;
        }
    }

    /// Whether the list or object ends here, with `end`, rather than going on.
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

    fn expect(&mut self, wanted: u8) -> Option<()> {
        let found = self.next()?;
        self.at += 1;
        (found == wanted).then_some(())
    }

    /// The next byte that is no space, without taking it.
    fn next(&mut self) -> Option<u8> {
        self.skip_space();
        self.text.as_bytes().get(self.at).copied()
    }

    fn skip_space(&mut self) {
        let bytes = self.text.as_bytes();
        while let Some(b' ' | b'\n' | b'\t' | b'\r') = bytes.get(self.at) {
            self.at += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn all(objects: Option<Vec<Members<'_>>>) -> Option<Vec<Vec<(String, String)>>> {
        let owned = |object: Members<'_>| {
            let members = object.iter();
            members
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .collect()
        };
        Some(objects?.into_iter().map(owned).collect())
    }

    fn value() -> impl Strategy<Value = Value> {
        let text = || "[a-c\"\\\\\n{}\\[\\],: \u{e9}\u{1F600}]{0,9}";
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i32>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            text().prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 5, move |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
                proptest::collection::vec((text(), inner), 0..5)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn what_is_json_is_split_as_by_a_parser(values in proptest::collection::vec(value(), 0..5), is_pretty: bool) {
            let text = match is_pretty {
                true => serde_json::to_string_pretty(&values),
                false => serde_json::to_string(&values),
            };
            let text = text.unwrap();
            prop_assert_eq!(all(objects(&text)), all(members::objects(&text)));
            prop_assert_eq!(list(&text), members::list(&text));
            for value in list(&text).unwrap() {
                let one = |object: serde_json::Result<_>| all(object.ok().map(|it| vec![it]));
                prop_assert_eq!(one(object(value)), one(Members::parse(value)));
            }
        }

        #[test]
        fn nothing_makes_it_panic(text in "[\\[\\]{}\",:\\\\ a1\u{e9}]{0,40}") {
            let _ = (objects(&text), object(&text), list(&text));
        }
    }

    #[test]
    fn odd_lists_are_split_as_by_a_parser() {
        for text in [
            "",
            "[]",
            " [ ] ",
            "{}",
            "[1]",
            "[{}]",
            "[{},{}]",
            r#"[{"a":1,"a":2}]"#,
            r#"[{"\u0061":1,"a":2}]"#,
            r#"[{"a":"\\"},{"b":"\""}]"#,
            r#"[ { "a" : [ "]" , {"}":-1.5e3} ] , "b":true } ]"#,
            r#"[{"a":null}"#,
            r#"[{"a":1}]x"#,
            r#"[{"a":1,}]"#,
            r#"[{"a"}]"#,
        ] {
            assert_eq!(all(objects(text)), all(members::objects(text)), "{text}");
        }
    }
}
