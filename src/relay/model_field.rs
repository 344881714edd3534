//! Replaces the value of `model` in a request's body; all other bytes stay. Pure.

use std::borrow::Cow;

use bytes::Bytes;

use crate::prompt::{self, Api, PeekedBody};

/// The body with the model's name in place of `value`, the raw JSON that [`crate::prompt::peek`] found within `body`.
/// `None` if it is no part of it.
pub(super) fn replaced(body: &[u8], value: &str, model: &str) -> Option<Bytes> {
    let start = value
        .as_ptr()
        .addr()
        .checked_sub(body.as_ptr().addr())
        .filter(|start| start + value.len() <= body.len())?;
    // Text always serializes.
    let name = serde_json::to_vec(model).ok()?;
    let mut whole = Vec::with_capacity(body.len() + name.len());
    whole.extend_from_slice(&body[..start]);
    whole.extend_from_slice(&name);
    whole.extend_from_slice(&body[start + value.len()..]);
    Some(whole.into())
}

/// Reads a body that was read before, now with another model's name in it.
pub(super) fn read_again<'b>(
    api: Api,
    body: &'b Bytes,
    block_bytes: u32,
    model: &'b str,
) -> PeekedBody<'b> {
    let peek = prompt::peek_router_made(api, body, block_bytes);
    // It cannot fail: nothing but the name is new.
    peek.unwrap_or_else(|_| PeekedBody {
        model: Some(Cow::Borrowed(model)),
        ..PeekedBody::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(body: &str, model: &str, expected: &str) {
        let peek = prompt::peek(Api::Chat, body.as_bytes(), 64).unwrap();
        let found = replaced(body.as_bytes(), peek.model_json.unwrap(), model).unwrap();
        assert_eq!(str::from_utf8(&found).unwrap(), expected);
        let again = prompt::peek(Api::Chat, &found, 64).unwrap();
        assert_eq!(again.model.as_deref(), Some(model));
        assert_eq!(again.prompt, peek.prompt);
    }

    #[test]
    fn only_the_name_changes() {
        check(
            r#" { "model" : "gpt-4o" ,"n":1.00, "messages":[{"role":"user","content":"gpt-4o"}]} "#,
            "meta/llama",
            r#" { "model" : "meta/llama" ,"n":1.00, "messages":[{"role":"user","content":"gpt-4o"}]} "#,
        );
        check(r#"{"model":"\u0061"}"#, "a\"b", r#"{"model":"a\"b"}"#);
        // Engines take the last one.
        check(
            r#"{"model":"x","model":"y"}"#,
            "z",
            r#"{"model":"x","model":"z"}"#,
        );
    }

    #[test]
    fn a_value_of_another_body_is_refused() {
        let body = String::from(r#"{"model":"x"}"#);
        assert_eq!(replaced(body.as_bytes(), "\"x\"", "z"), None);
    }
}
