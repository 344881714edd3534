//! The input of a custom tool, out of the growing arguments of the function that stands for it. Pure.

/// The value of the member `input` in `arguments`, the text of a JSON object that may not be complete: what follows its
/// opening quote. `None` if the object begins otherwise.
pub(super) fn value(arguments: &str) -> Option<&str> {
    let inside = arguments.trim_start().strip_prefix('{')?;
    let value = inside.trim_start().strip_prefix("\"input\"")?;
    let value = value.trim_start().strip_prefix(':')?;
    value.trim_start().strip_prefix('"')
}

/// The part of a [value] after its first `sent` bytes that consists of whole characters, as a JSON string without quotes.
/// Looks at no byte before it, so that long inputs cost no more than they are long.
pub(super) fn more(value: &str, sent: usize) -> &str {
    let rest = value.get(sent..).unwrap_or_default();
    &rest[..complete(rest.as_bytes())]
}

/// How many of the bytes are whole characters of a JSON string, up to its end.
fn complete(text: &[u8]) -> usize {
    let mut at = 0;
    while let Some(byte) = text.get(at) {
        let length = match byte {
            b'"' => return at,
            b'\\' => escape_length(&text[at..]),
            _ => Some(1),
        };
        match length {
            Some(length) => at += length,
            None => return at,
        }
    }
    at
}

/// The length of the escape that the text begins with; `None` if it is not complete. Both halves of a character beyond
/// `\uFFFF` are one.
fn escape_length(text: &[u8]) -> Option<usize> {
    const HIGH: [&[u8]; 8] = [b"d8", b"d9", b"da", b"db", b"D8", b"D9", b"Da", b"Db"];
    const HIGH_UPPER: [&[u8]; 4] = [b"DA", b"DB", b"dA", b"dB"];
    match text.get(1)? {
        b'u' => {
            let start = text.get(2..6)?;
            let start = &start[..2];
            if HIGH.contains(&start) || HIGH_UPPER.contains(&start) {
                text.get(6..12).map(|_| 12)
            } else {
                Some(6)
            }
        }
        _ => Some(2),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn started_input(arguments: &str) -> Option<&str> {
        let whole = value(arguments).map(|value| more(value, 0))?;
        // In two steps it is the same.
        let half = more(whole, 0).len() / 2;
        let value = value(arguments)?;
        let half = (0..=half)
            .rfind(|at| value.is_char_boundary(*at) && complete(&value.as_bytes()[..*at]) == *at)?;
        assert_eq!([&value[..half], more(value, half)].concat(), whole);
        Some(whole)
    }

    #[test]
    fn only_whole_characters_are_there() {
        let check = |arguments: &str, expected: Option<&str>| {
            assert_eq!(started_input(arguments), expected, "{arguments}");
        };
        check("", None);
        check("{\"input\"", None);
        check("{\"input\":", None);
        check("{\"other\":\"a\"", None);
        check("{ \"input\" : \"", Some(""));
        check("{\"input\":\"a b", Some("a b"));
        check(r#"{"input":"a\"#, Some("a"));
        check(r#"{"input":"a\n"#, Some(r"a\n"));
        check(r#"{"input":"a\u00e"#, Some("a"));
        check(r#"{"input":"a\u00e9"#, Some(r"a\u00e9"));
        check(r#"{"input":"a\ud83d\ude0"#, Some("a"));
        check(r#"{"input":"a\uD83D\uDE00b"#, Some(r"a\uD83D\uDE00b"));
        check(r#"{"input":"a\"b","x":1}"#, Some(r#"a\"b"#));
    }

    proptest! {
        #[test]
        fn any_cut_is_a_start_of_the_whole(text in ".{0,12}", ascii: bool, cut: usize) {
            let mut value = serde_json::to_string(&text).unwrap();
            if ascii {
                let escaped = |unit: u16| format!("\\u{unit:04x}");
                value = format!("\"{}\"", text.encode_utf16().map(escaped).collect::<String>());
            }
            let whole = format!("{{\"input\":{value}}}");
            let ends: Vec<usize> = (0..=whole.len()).filter(|end| whole.is_char_boundary(*end)).collect();
            let end = ends[cut % ends.len()];
            if let Some(start) = started_input(&whole[..end]) {
                prop_assert!(value[1..].starts_with(start));
                let decoded: Result<String, _> = serde_json::from_str(&format!("\"{start}\""));
                prop_assert!(decoded.is_ok_and(|decoded| text.starts_with(&decoded)));
            }
            prop_assert_eq!(started_input(&whole), Some(&value[1..value.len() - 1]));
        }
    }
}
