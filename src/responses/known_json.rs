//! Splits JSON that was read as such before: stored items, and parts of a body. Pure.
//!
//! A long history is split on every turn. What is in its strings, nearly all of it, is only searched for their ends,
//! several times as fast as a parser that checks them.
//!
//! Of a text that is not JSON the result may be anything.

use std::iter;

use super::members::Members;
use crate::json_scan::Scan;

/// The elements of a list, each read by `read`, one at a time: all those of a long list together would take many times
/// the bytes of their text, and a client's list may be refused for its first one. `None` if the text is no list. An
/// element that `read` does not take is `None`, and none follows it.
fn elements<'a, T>(
    text: &'a str,
    read: impl Fn(&mut Scan<'a, false>) -> Option<T>,
) -> Option<impl Iterator<Item = Option<T>>> {
    let mut scan = Scan::<false>::new(text);
    let mut has_next = scan.open_list()?;
    Some(iter::from_fn(move || {
        if !has_next {
            return None;
        }
        let element = read(&mut scan);
        has_next = element.is_some() && scan.next_element() == Some(true);
        Some(element)
    }))
}

/// The objects of a list, one at a time; `None` if the text is no list. An element that is no object is `None`, and
/// none follows it.
pub(super) fn objects(text: &str) -> Option<impl Iterator<Item = Option<Members<'_>>>> {
    elements(text, Members::scan)
}

/// The objects of a list before the first element that is none, one at a time; nothing if there is no list.
pub(super) fn each_object(list: Option<&str>) -> impl Iterator<Item = Members<'_>> {
    list.and_then(objects).into_iter().flatten().flatten()
}

/// The elements of a list as written, one at a time; `None` if the text is no list.
pub(super) fn values(text: &str) -> Option<impl Iterator<Item = &str>> {
    Some(elements(text, Scan::value)?.flatten())
}

/// The object that a text is that is JSON.
pub(super) fn object(text: &str) -> Option<Members<'_>> {
    let mut scan = Scan::<false>::new(text);
    Members::scan(&mut scan).filter(|_| scan.is_over())
}

/// The elements of a list as written; `None` if the text is no list.
pub(super) fn list(text: &str) -> Option<Vec<&str>> {
    Scan::<false>::new(text).whole_list(Scan::value)
}

#[cfg(test)]
mod tests {
    use std::fmt;

    use proptest::prelude::*;
    use serde::de::{MapAccess, Visitor};
    use serde::{Deserialize, Deserializer};
    use serde_json::Value;
    use serde_json::value::RawValue;

    use super::*;
    use crate::responses::members;

    /// As a parser reads them: the plainest model.
    impl<'de> Deserialize<'de> for Members<'de> {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            struct V;
            impl<'de> Visitor<'de> for V {
                type Value = Members<'de>;

                fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    f.write_str("a JSON object")
                }

                fn visit_map<A: MapAccess<'de>>(
                    self,
                    mut map: A,
                ) -> Result<Members<'de>, A::Error> {
                    let mut members = Members::default();
                    while let Some((name, value)) = map.next_entry::<String, &'de RawValue>()? {
                        members.push(name.into(), value.get());
                    }
                    Ok(members)
                }
            }
            deserializer.deserialize_map(V)
        }
    }

    fn parsed_list(text: &str) -> Option<Vec<&str>> {
        let items: Vec<&RawValue> = serde_json::from_str(text).ok()?;
        Some(items.into_iter().map(RawValue::get).collect())
    }

    fn objects(text: &str) -> Option<Vec<Members<'_>>> {
        super::objects(text)?.collect()
    }

    /// The objects of a list of any text; `None` if it is not a list of objects.
    fn checked_objects(text: &str) -> Option<Vec<Members<'_>>> {
        let items = members::list(text)?;
        let objects = items.into_iter().map(|item| Members::parse(item).ok());
        objects.collect()
    }

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
            let text = if is_pretty {
                serde_json::to_string_pretty(&values)
            } else {
                serde_json::to_string(&values)
            };
            let text = text.unwrap();
            let parsed = all(serde_json::from_str(&text).ok());
            prop_assert_eq!(all(objects(&text)), parsed.clone());
            prop_assert_eq!(all(checked_objects(&text)), parsed);
            prop_assert_eq!(list(&text), parsed_list(&text));
            prop_assert_eq!(super::values(&text).map(Iterator::collect::<Vec<_>>), parsed_list(&text));
            prop_assert_eq!(members::list(&text), parsed_list(&text));
            for value in list(&text).unwrap() {
                let one = |object: Option<_>| all(object.map(|members| vec![members]));
                let parsed = one(serde_json::from_str(value).ok());
                prop_assert_eq!(one(object(value)), parsed.clone());
                prop_assert_eq!(one(Members::parse(value).ok()), parsed);
            }
        }

        #[test]
        fn any_text_is_an_object_as_for_a_parser(
            values in proptest::collection::vec((".{0,20}", value()), 0..4),
            is_pretty: bool,
            changes in proptest::collection::vec((any::<proptest::sample::Index>(), "[\\[\\]{}\",:\\\\ a10\u{1}n.eE+u-]{0,2}"), 0..3),
        ) {
            let object: Value = values.into_iter().collect();
            let text = if is_pretty {
                serde_json::to_string_pretty(&object)
            } else {
                serde_json::to_string(&object)
            };
            let mut text: Vec<char> = text.unwrap().chars().collect();
            for (at, other) in changes {
                let at = at.index(text.len() + 1);
                text.splice(at..(at + 1).min(text.len()), other.chars());
            }
            let text: String = text.into_iter().collect();
            let one = |object: serde_json::Result<_>| {
                let object = object.map_err(|error| error.to_string())?;
                Ok::<_, String>(all(Some(vec![object])))
            };
            prop_assert_eq!(one(Members::parse(&text)), one(serde_json::from_str(&text)));
            prop_assert_eq!(members::list(&text), parsed_list(&text));
            let text = format!("[{text}]");
            prop_assert_eq!(all(checked_objects(&text)), all(serde_json::from_str(&text).ok()));
        }

        #[test]
        fn nothing_makes_it_panic(text in "[\\[\\]{}\",:\\\\ a1\u{e9}]{0,40}") {
            let _ = (objects(&text), object(&text), list(&text), values(&text).map(Iterator::count));
        }
    }

    #[test]
    fn long_and_odd_strings_are_read_as_by_a_parser() {
        for length in 0..90 {
            for odd in [
                "", "\\n", "\\\"", "\n", "\u{1}", "\\u00e9", "\\u00x9", "\\x", "\u{e9}", "\"", "\\",
            ] {
                for behind in [0, 1, 7, 40] {
                    let (before, after) = ("a".repeat(length), "b".repeat(behind));
                    let text = format!("{{\"{before}\": \"{before}{odd}{after}\", \"x\":1}}");
                    let one = |object: serde_json::Result<_>| {
                        all(object.ok().map(|members| vec![members]))
                    };
                    assert_eq!(
                        one(Members::parse(&text)),
                        one(serde_json::from_str(&text)),
                        "{text}"
                    );
                }
            }
        }
        let deep = |levels| format!("{{\"a\":{}1{}}}", "[".repeat(levels), "]".repeat(levels));
        for levels in [1, 63, 64, 65, 200] {
            assert_eq!(Members::parse(&deep(levels)).unwrap().len(), 1);
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
            r#"[{"a":1,}]"#,
            r#"[{"a"}]"#,
        ] {
            let parsed = all(serde_json::from_str(text).ok());
            assert_eq!(all(objects(text)), parsed, "{text}");
            assert_eq!(all(checked_objects(text)), parsed, "{text}");
        }
        for text in [r#"[{"a":null}"#, r#"[{"a":1}]x"#] {
            assert_eq!(all(checked_objects(text)), None, "{text}");
        }
    }

    #[test]
    fn elements_are_read_one_at_a_time_and_none_after_one_that_is_no_object() {
        let are_objects = |text: &str| {
            let objects = super::objects(text)?;
            Some(objects.map(|object| object.is_some()).collect::<Vec<_>>())
        };
        for (text, expected) in [
            ("7", None),
            ("{}", None),
            ("\"[{}]\"", None),
            ("[]", Some(vec![])),
            ("[{},{}]", Some(vec![true, true])),
            ("[{},7,{}]", Some(vec![true, false])),
            ("[[{}],{}]", Some(vec![false])),
        ] {
            assert_eq!(are_objects(text), expected, "{text}");
            let before = expected.unwrap_or_default().into_iter();
            let before = before.take_while(|is_object| *is_object).count();
            assert_eq!(each_object(Some(text)).count(), before, "{text}");
        }
        assert_eq!(each_object(None).count(), 0);
        // What follows the first one is not even JSON.
        let mut first = super::objects(r#"[{"a":1},{"a""#).unwrap();
        assert_eq!(first.next().flatten().unwrap().get("a"), Some("1"));
        assert_eq!(values("[7,\"").unwrap().next(), Some("7"));
    }
}
