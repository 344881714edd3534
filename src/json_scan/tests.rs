use std::fmt;

use proptest::prelude::*;
use serde::de::{Deserializer as _, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::*;

/// The members of an object as `serde_json` reads them, in their order: the plainest model.
struct Members(Vec<(String, String)>);

impl<'de> Visitor<'de> for Members {
    type Value = Vec<(String, String)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self::Value, A::Error> {
        while let Some((name, value)) = map.next_entry::<String, &RawValue>()? {
            self.0.push((name, value.get().to_owned()));
        }
        Ok(self.0)
    }
}

fn parsed(text: &[u8]) -> Option<Vec<(String, String)>> {
    let mut json = serde_json::Deserializer::from_slice(text);
    let members = json.deserialize_map(Members(Vec::new())).ok()?;
    json.end().ok().map(|()| members)
}

fn scanned<const CHECKS: bool>(text: &[u8]) -> Option<Vec<(String, String)>> {
    let mut members = Vec::new();
    let scan = Scan::<CHECKS>::of_bytes(text)?;
    scan.whole_object(|name, value| members.push((name.into_owned(), value.to_owned())))?;
    Some(members)
}

fn space() -> impl Strategy<Value = &'static str> {
    prop_oneof![6 => Just(""), 1 => Just(" "), 1 => Just("\n\t\r  ")]
}

/// A string: its characters are written as they are, with escapes or as surrogates.
fn string() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        4 => "[a-c {}\\[\\],:\u{e9}\u{1F600}]{1,9}",
        1 => prop::sample::select(vec![
            "\\n", "\\\"", "\\\\", "\\/", "\\b", "\\u0061", "\\u00E9", "\\ud83d\\ude00", "\\ud83d", "\\uDE00\\u0061", "\\u0000",
        ]).prop_map(str::to_owned),
    ];
    let pieces = prop::collection::vec(piece, 0..4);
    pieces.prop_map(|pieces| format!("\"{}\"", pieces.concat()))
}

fn value() -> impl Strategy<Value = String> {
    let number = prop::sample::select(vec![
        "0",
        "-0",
        "7",
        "12345678901234567890123",
        "-1.50",
        "1e999",
        "2E-3",
        "0.0e+0",
    ]);
    let word = prop::sample::select(vec!["null", "true", "false"]);
    let leaf = prop_oneof![
        2 => string(),
        1 => number.prop_map(str::to_owned),
        1 => word.prop_map(str::to_owned),
    ];
    leaf.prop_recursive(5, 40, 5, |inner| {
        let list = (prop::collection::vec(inner.clone(), 0..5), space());
        prop_oneof![
            list.prop_map(|(values, space)| format!(
                "[{space}{}{space}]",
                values.join(&format!("{space},{space}"))
            )),
            object(inner),
        ]
    })
}

fn object(value: impl Strategy<Value = String>) -> impl Strategy<Value = String> {
    // Names of one letter, often the same and often with an escape.
    let name = prop_oneof![
        "\"[ab]\"",
        Just("\"\\u0061\"".to_owned()),
        Just("\"\"".to_owned()),
        string(),
    ];
    (prop::collection::vec((name, value), 0..5), space()).prop_map(|(members, space)| {
        let members: Vec<String> = members
            .into_iter()
            .map(|(name, value)| format!("{name}{space}:{space}{value}{space}"))
            .collect();
        format!(
            "{space}{{{space}{}}}{space}",
            members.join(&format!(",{space}"))
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn an_object_is_read_as_by_a_parser(text in object(value())) {
        let parsed = parsed(text.as_bytes());
        prop_assert_eq!(&scanned::<true>(text.as_bytes()), &parsed);
        if parsed.is_some() {
            prop_assert_eq!(scanned::<false>(text.as_bytes()), parsed);
        }
    }

    #[test]
    fn any_bytes_are_an_object_as_for_a_parser(
        text in object(value()),
        changes in prop::collection::vec((any::<prop::sample::Index>(), 0..2_usize, prop_oneof![
            2 => prop::sample::select(b"[]{}\",:\\ a10\x01n.eE+-u/\xff\xc3".to_vec()), 1 => any::<u8>(),
        ]), 1..4),
    ) {
        let mut text = text.into_bytes();
        for (at, removed, byte) in changes {
            let at = at.index(text.len() + 1);
            text.splice(at..(at + removed).min(text.len()), [byte]);
        }
        prop_assert_eq!(scanned::<true>(&text), parsed(&text));
        // Whatever the text is, a scan that does not check it ends.
        scanned::<false>(&text);
    }
}

#[test]
fn any_number_of_levels_is_read() {
    for levels in [1, 63, 64, 65, 127, 128, 129, 20_000] {
        for (begin, end) in [("[", "]"), ("{\"a\":", "}"), ("[{\"\\u0061\": ", "}]")] {
            let deep =
                |ends: usize| format!("{{\"x\":{}1{}}}", begin.repeat(levels), end.repeat(ends));
            for ends in [levels - 1, levels, levels + 1] {
                let text = deep(ends);
                let found = scanned::<true>(text.as_bytes());
                assert_eq!(found, parsed(text.as_bytes()), "{levels} {begin} {ends}");
                assert_eq!(found.is_some(), ends == levels);
            }
        }
    }
}

#[test]
fn only_surrogates_without_their_other_half_are_replaced() {
    for (text, expected) in [
        (r#""a\ud83d""#, Some(r#""a\ufffd""#)),
        (
            r#""\uDE00 \ud83d\ude00 \ud83d\n""#,
            Some(r#""\ufffd \ud83d\ude00 \ufffd\n""#),
        ),
        (r#""\ud83d\ud83d\ude00""#, Some(r#""\ufffd\ud83d\ude00""#)),
        (r#""\\ud83d \ud83d\ude00 \u00e9""#, None),
        (r#""\ud8""#, None),
        (r#""é\ud800é""#, Some(r#""é\ufffdé""#)),
    ] {
        assert_eq!(without_lone_surrogates(text).as_deref(), expected, "{text}");
    }
}
