//! Edits of a request's body: values replaced or added, all other bytes as they are. Pure.

use std::borrow::Cow;
use std::ops::Range;

use bytes::Bytes;

use crate::prompt::{self, Api, PeekedBody};

/// Bytes in place of others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::relay) struct Edit {
    pub(in crate::relay) range: Range<usize>,
    pub(in crate::relay) text: String,
}

impl Edit {
    /// A text in place of `value`, the raw JSON that [`crate::prompt::peek`] found within `body`. `None` if it is no part
    /// of it.
    pub(in crate::relay) fn of_value(body: &[u8], value: &str, text: String) -> Option<Self> {
        Self::of_part(body, value.as_bytes(), text)
    }

    fn of_part(body: &[u8], part: &[u8], text: String) -> Option<Self> {
        let start = part.as_ptr().addr().checked_sub(body.as_ptr().addr())?;
        let range = start..start + part.len();
        (range.end <= body.len()).then_some(Self { range, text })
    }

    /// One more field at the start of `object`, which is the body or a value in it. `None` if that is no object.
    pub(in crate::relay) fn first_field(
        body: &[u8],
        object: &[u8],
        name: &str,
        json: &str,
    ) -> Option<Self> {
        let inside = object.trim_ascii_start().strip_prefix(b"{")?;
        let comma = match inside.trim_ascii_start().first()? {
            b'}' => "",
            _ => ",",
        };
        Self::of_part(body, &inside[..0], format!("\"{name}\":{json}{comma}"))
    }

    /// One more field at the body's end. `None` if the body is no object.
    pub(in crate::relay) fn last_field(body: &[u8], name: &str, json: &str) -> Option<Self> {
        let end = body.iter().rposition(|byte| *byte == b'}')?;
        let start = body[..end].trim_ascii_end().len();
        let comma = match body[..start].last() {
            Some(b'{') => "",
            _ => ",",
        };
        Some(Self {
            range: start..start,
            text: format!("{comma}\"{name}\":{json}"),
        })
    }
}

/// The body after all edits, which must not overlap.
pub(in crate::relay) fn applied(body: &Bytes, edits: &mut [Edit]) -> Bytes {
    if edits.is_empty() {
        return body.clone();
    }
    edits.sort_by_key(|edit| edit.range.start);
    let longer: usize = edits.iter().map(|edit| edit.text.len()).sum();
    let mut whole = Vec::with_capacity(body.len() + longer);
    let mut position = 0;
    for edit in edits {
        whole.extend_from_slice(&body[position..edit.range.start]);
        whole.extend_from_slice(edit.text.as_bytes());
        position = edit.range.end;
    }
    whole.extend_from_slice(&body[position..]);
    whole.into()
}

/// Reads a body that was read before, now with another model's name or more fields in it.
pub(in crate::relay) fn read_again<'b>(
    api: Api,
    body: &'b Bytes,
    block_bytes: u32,
    model: &'b str,
) -> PeekedBody<'b> {
    let peek = prompt::peek_router_made(api, body, block_bytes);
    // It cannot fail: nothing but the edits is new.
    peek.unwrap_or_else(|_| PeekedBody {
        model: Some(Cow::Borrowed(model)),
        ..PeekedBody::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(body: &str, model: &str, expected: &str) {
        let body = Bytes::copy_from_slice(body.as_bytes());
        let peek = prompt::peek(Api::Chat, &body, 64).unwrap();
        let name = serde_json::to_string(model).unwrap();
        let model_edit = Edit::of_value(&body, peek.model_json.unwrap(), name).unwrap();
        let field = Edit::last_field(&body, "last", "1").unwrap();
        let found = applied(&body, &mut [field, model_edit]);
        assert_eq!(str::from_utf8(&found).unwrap(), expected);
        let again = read_again(Api::Chat, &found, 64, model);
        assert_eq!(again.model.as_deref(), Some(model));
        assert_eq!(again.prompt, peek.prompt);
    }

    #[test]
    fn only_the_edits_change() {
        check(
            r#" { "model" : "gpt-4o" ,"n":1.00, "messages":[{"role":"user","content":"gpt-4o"}] } "#,
            "meta/llama",
            r#" { "model" : "meta/llama" ,"n":1.00, "messages":[{"role":"user","content":"gpt-4o"}],"last":1 } "#,
        );
        check(
            r#"{"model":"\u0061"}"#,
            "a\"b",
            r#"{"model":"a\"b","last":1}"#,
        );
        // Engines take the last one.
        check(
            r#"{"model":"x","model":"y"}"#,
            "z",
            r#"{"model":"x","model":"z","last":1}"#,
        );
        let empty = Bytes::from_static(b"{ }");
        let field = Edit::last_field(&empty, "last", "{}").unwrap();
        assert_eq!(applied(&empty, &mut [field]), r#"{"last":{} }"#);
        assert_eq!(applied(&empty, &mut []), empty);
    }

    #[test]
    fn a_value_of_another_body_is_refused() {
        let body = String::from(r#"{"model":"x"}"#);
        assert_eq!(
            Edit::of_value(body.as_bytes(), "\"x\"", String::new()),
            None
        );
        assert_eq!(Edit::last_field(b"[]", "a", "1"), None);
    }
}
