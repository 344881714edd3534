//! How deep the lists and objects of a request body are nested: one limit for all fields, whether the router reads
//! them or passes them on unread. Pure.

use std::borrow::Cow;

use super::types::{Error, MAX_NESTING};

/// Refuses a body that is nested deeper than 100 levels, with the name of the field. Says nothing of whether the
/// body is JSON.
pub fn check_nesting(body: &[u8]) -> Result<(), Error> {
    // Nearly all bodies have few lists and objects in all. Counting them needs no look at the strings.
    let opened = memchr::memchr2_iter(b'[', b'{', body).take(MAX_NESTING + 1);
    if opened.count() <= MAX_NESTING {
        return Ok(());
    }
    scan(body)
}

fn scan(body: &[u8]) -> Result<(), Error> {
    let mut depth = 0_usize;
    // The last string of the body's own level: the key, while the scan is inside its value.
    let mut key = &b""[..];
    let mut position = 0;
    while let Some(byte) = body.get(position) {
        position += 1;
        match byte {
            b'"' => {
                let length = string_length(&body[position..]);
                if depth == 1 {
                    key = &body[position..position + length];
                }
                position += length + 1;
            }
            b'[' | b'{' => {
                depth += 1;
                if depth > MAX_NESTING {
                    return Err(Error::TooDeep(name(key)));
                }
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    Ok(())
}

/// The bytes before the quote that ends a string; all that are left if none does.
fn string_length(text: &[u8]) -> usize {
    let mut position = 0;
    while let Some(next) = memchr::memchr2(b'"', b'\\', &text[position..]) {
        position += next;
        if text[position] == b'"' {
            return position;
        }
        position = (position + 2).min(text.len());
    }
    text.len()
}

fn name(key: &[u8]) -> String {
    const MAX_BYTES: usize = 100;
    let name: Cow<'_, str> = String::from_utf8_lossy(&key[..key.len().min(MAX_BYTES)]);
    name.into_owned()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn nested(depth: usize) -> Value {
        (0..depth).fold(json!(1), |inner, level| match level % 2 {
            0 => json!([inner]),
            _ => json!({"a": inner}),
        })
    }

    #[test]
    fn every_field_has_the_same_limit_and_is_named() {
        for field in ["messages", "tools", "unknown", "vllm_xargs", "model"] {
            let fits = json!({"b": "x", field: nested(MAX_NESTING - 1), "c": []}).to_string();
            assert_eq!(check_nesting(fits.as_bytes()), Ok(()), "{field}");
            let deep = json!({"b": "x", field: nested(MAX_NESTING), "c": []}).to_string();
            let refused = Err(Error::TooDeep(field.to_owned()));
            assert_eq!(check_nesting(deep.as_bytes()), refused);
        }
    }

    #[test]
    fn brackets_in_strings_and_many_short_lists_are_no_nesting() {
        let text = "[{\"\\".repeat(200);
        let body = json!({"a": text, "b": vec![json!([]); 1000]}).to_string();
        assert_eq!(check_nesting(body.as_bytes()), Ok(()));
    }

    fn depth(value: &Value) -> usize {
        match value {
            Value::Array(list) => 1 + list.iter().map(depth).max().unwrap_or(0),
            Value::Object(map) => 1 + map.values().map(depth).max().unwrap_or(0),
            _ => 0,
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(
            proptest::sample::select(b"[]{}\"\\a,:".to_vec()), 0..600,
        )) {
            _ = scan(&bytes);
        }

        #[test]
        fn what_it_passes_is_no_deeper_than_the_limit(levels in 90_usize..110, text in "[\\[\\]{}\"\\\\a]{0,20}") {
            let body = json!({"a": text, "b": nested(levels), "c": text});
            let passes = scan(body.to_string().as_bytes()).is_ok();
            prop_assert_eq!(passes, depth(&body) <= MAX_NESTING);
        }
    }
}
