//! The input of a custom tool, out of the growing arguments of the function that stands for it. Pure.

use std::borrow::Cow;

use crate::responses::members;

/// The value of the member `input` in `arguments`, the text of a JSON object that may not be complete: what follows its
/// opening quote. `None` if the object begins otherwise.
pub(super) fn value(arguments: &str) -> Option<&str> {
    let inside = arguments.trim_start().strip_prefix('{')?;
    let value = inside.trim_start().strip_prefix("\"input\"")?;
    let value = value.trim_start().strip_prefix(':')?;
    value.trim_start().strip_prefix('"')
}

/// The part of a [value] after its first `sent` bytes that consists of whole characters, as the model wrote them.
/// Looks at no byte before it, so that long inputs cost no more than they are long.
pub(super) fn more(value: &str, sent: usize) -> &str {
    let rest = value.get(sent..).unwrap_or_default();
    &rest[..complete(rest.as_bytes())]
}

/// Whole characters of a JSON string as JSON has them: some models write line ends and tabs as they are, and a backslash
/// before a character that needs none.
pub(super) fn valid(text: &str) -> Cow<'_, str> {
    let is_special = |letter: char| letter < ' ' || letter == '\\';
    if !text.contains(is_special) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    let mut rest = text;
    while let Some(at) = rest.find(is_special) {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let length = match escape_length(rest.as_bytes()) {
            Some(length) if length > 1 => {
                out.push_str(&rest[..length]);
                length
            }
            _ => {
                let quoted = members::quoted(&rest[..1]);
                out.push_str(members::escaped(&quoted).unwrap_or_default());
                1
            }
        };
        rest = &rest[length..];
    }
    out.push_str(rest);
    Cow::Owned(out)
}

/// How many of the bytes are whole characters of a JSON string, up to its end.
fn complete(text: &[u8]) -> usize {
    let mut at = 0;
    while let Some(byte) = text.get(at) {
        if *byte == b'"' {
            return at;
        }
        match escape_length(&text[at..]) {
            Some(length) => at += length,
            None => return at,
        }
    }
    at
}

/// The length of the escape that the text begins with, 1 if it begins with none; `None` if it is not complete. Both halves
/// of a character beyond `\uFFFF` are one.
fn escape_length(text: &[u8]) -> Option<usize> {
    if text.first() != Some(&b'\\') {
        return Some(1);
    }
    match text.get(1)? {
        b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => Some(2),
        b'u' => {
            let first = unicode_length(text)?;
            let is_high = first == 6
                && matches!(text[2], b'd' | b'D')
                && matches!(text[3], b'8' | b'9' | b'a' | b'b' | b'A' | b'B');
            let rest = text.get(first..).unwrap_or_default();
            if !is_high || rest.first().is_some_and(|byte| *byte != b'\\') {
                return Some(first);
            }
            match rest.get(1)? {
                b'u' if unicode_length(rest)? == 6 => Some(12),
                _ => Some(6),
            }
        }
        _ => Some(1),
    }
}

/// What [`escape_length`] is for a text that begins with `\u`: 6, or 1 without four digits.
fn unicode_length(text: &[u8]) -> Option<usize> {
    let digits = text.iter().skip(2).take(4);
    let digits = digits.take_while(|byte| byte.is_ascii_hexdigit()).count();
    match digits {
        4 => Some(6),
        _ if text.len() == 2 + digits => None,
        _ => Some(1),
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
        // Backslashes that begin no escape, and halves of a character.
        check(r#"{"input":"\d\u12"}"#, Some(r"\d\u12"));
        check(r#"{"input":"\é\u12"#, Some(r"\é"));
        check(r#"{"input":"\ud83d"}"#, Some(r"\ud83d"));
        check(
            r#"{"input":"\ud83d\n\ud83d\u12"}"#,
            Some(r"\ud83d\n\ud83d\u12"),
        );
    }

    #[test]
    fn what_json_does_not_have_is_escaped() {
        for (written, expected) in [
            ("", ""),
            ("é", "é"),
            (r"\n\\\u00e9\/", r"\n\\\u00e9\/"),
            (r#"\"\ud83d\ude00"#, r#"\"\ud83d\ude00"#),
            ("a\n\tb\u{1}", r"a\n\tb\u0001"),
            (r"\d\é\u12 \x", r"\\d\\é\\u12 \\x"),
            ("\\\n", r"\\\n"),
        ] {
            assert_eq!(valid(written), expected, "{written}");
            let decoded = serde_json::from_str::<String>(&format!("\"{expected}\""));
            assert!(decoded.is_ok(), "{expected}");
        }
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
            prop_assert_eq!(valid(&value[1..value.len() - 1]), &value[1..value.len() - 1]);
        }

        #[test]
        fn whatever_a_model_writes_becomes_json_however_it_is_cut(written in "[a\\\\\"ud8c/é\n\t]{0,24}", cut: usize) {
            let text = more(&written, 0);
            let ends: Vec<usize> = (0..=text.len()).filter(|end| text.is_char_boundary(*end)).collect();
            let first = more(&text[..ends[cut % ends.len()]], 0);
            let joined = format!("{}{}", valid(first), valid(&text[first.len()..]));
            prop_assert_eq!(joined.as_str(), valid(text));
            let read = serde_json::from_str::<serde::de::IgnoredAny>(&format!("\"{joined}\""));
            prop_assert!(read.is_ok());
        }
    }
}
