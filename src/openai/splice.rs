//! Inserts or replaces a field of a JSON body and leaves all other bytes as they are. Pure.

use std::borrow::Cow;
use std::collections::BTreeMap;

use bytes::{Bytes, BytesMut};
use serde_json::value::RawValue;

/// The JSON object `body` with `field` (such as `"name":1`) before all its others. A body that is not an
/// object is returned unchanged.
pub fn first_field(body: &Bytes, field: &str) -> Bytes {
    let is_blank = |byte: &u8| b" \t\r\n".contains(byte);
    let Some(open) = body.iter().position(|byte| !is_blank(byte)) else {
        return body.clone();
    };
    let (start, rest) = body.split_at(open + 1);
    if body[open] != b'{' {
        return body.clone();
    }
    let is_empty = rest.iter().find(|byte| !is_blank(byte)) == Some(&b'}');
    let mut spliced = BytesMut::with_capacity(body.len() + field.len() + 1);
    spliced.extend_from_slice(start);
    spliced.extend_from_slice(field.as_bytes());
    if !is_empty {
        spliced.extend_from_slice(b",");
    }
    spliced.extend_from_slice(rest);
    spliced.freeze()
}

/// The JSON object `object` with a text as the value of its field `name`. One that has no such field is returned
/// unchanged.
pub fn with_text<'o>(object: &'o str, name: &str, value: &str) -> Cow<'o, str> {
    let fields: BTreeMap<Cow<'_, str>, &RawValue> =
        serde_json::from_str(object).unwrap_or_default();
    let Some(old) = fields.get(name).map(|raw| raw.get()) else {
        return Cow::Borrowed(object);
    };
    let start = old.as_ptr().addr() - object.as_ptr().addr();
    let (before, rest) = object.split_at(start);
    let value = serde_json::Value::from(value);
    Cow::Owned(format!("{before}{value}{}", &rest[old.len()..]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::{self, Api};

    #[test]
    fn a_field_goes_first_and_the_rest_stays() {
        let check = |body: &'static str, expected: &str| {
            let spliced = first_field(&Bytes::from_static(body.as_bytes()), r#""s":"x""#);
            assert_eq!(spliced, expected);
        };
        check(r#"{"a": 1.00}"#, r#"{"s":"x","a": 1.00}"#);
        check(" \n{ \"a\":1 } ", " \n{\"s\":\"x\", \"a\":1 } ");
        check("{}", r#"{"s":"x"}"#);
        check("{ }", r#"{"s":"x" }"#);
        check("[{}]", "[{}]");
        check("", "");
    }

    #[test]
    fn a_text_takes_the_place_of_another_and_the_rest_stays() {
        let check = |object: &str, expected: &str| {
            assert_eq!(with_text(object, "id", "a\"b"), expected);
        };
        check(
            r#"{"x": 1.0, "id" : "llama" ,"permission":[{"id":"p"}]}"#,
            r#"{"x": 1.0, "id" : "a\"b" ,"permission":[{"id":"p"}]}"#,
        );
        check(r#"{"x":{"id":"y"}}"#, r#"{"x":{"id":"y"}}"#);
        check("[]", "[]");
    }

    #[test]
    fn fields_found_in_a_salted_body_point_into_it() {
        let body = Bytes::from_static(br#"{"model":"m","messages":[]}"#);
        let salted = first_field(&body, r#""cache_salt":"s""#);
        let peek = prompt::peek(Api::Chat, &salted, 64).unwrap();
        assert_eq!(
            (peek.cache_salt.as_deref(), peek.cache_salt_count),
            (Some("s"), 1)
        );
        let model = peek.model_json.unwrap().as_bytes().as_ptr_range();
        let whole = salted.as_ptr_range();
        assert!(whole.start < model.start && model.end < whole.end);
        let twice = first_field(&salted, r#""cache_salt":"t""#);
        let peek = prompt::peek(Api::Chat, &twice, 64).unwrap();
        assert_eq!(peek.cache_salt_count, 2);
    }
}
