//! Streams report usage only if they are asked to (`stream_options.include_usage`). The router asks where the client did
//! not, and takes the event with the usage out of what the client gets. Pure.

use std::sync::LazyLock;

use bytes::{Bytes, BytesMut};
use memchr::memmem;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

use super::body_edit::Edit;
use super::engine_answer::has_usage;
use crate::prompt::{Api, PeekedBody};

const NAME: &str = "stream_options";
const ASKING: &str = r#"{"include_usage":true}"#;

/// The edit that asks for usage. `None` if the answer has it anyway, or if the body is not as engines accept it.
pub(super) fn asking(api: Api, body: &[u8], peek: &PeekedBody<'_>) -> Option<Edit> {
    if !peek.is_stream || !matches!(api, Api::Chat | Api::Completions) {
        return None;
    }
    let Some(options) = peek.stream_options else {
        return Edit::last_field(body, NAME, ASKING);
    };
    let text = match serde_json::from_str::<Option<Map<String, Value>>>(options).ok()? {
        None => ASKING.to_owned(),
        Some(own) if own.get("include_usage") == Some(&Value::Bool(true)) => return None,
        Some(mut own) => {
            own.insert("include_usage".to_owned(), Value::Bool(true));
            Value::from(own).to_string()
        }
    };
    Edit::of_value(body, options, text)
}

static BLANK: LazyLock<memmem::Finder<'static>> = LazyLock::new(|| memmem::Finder::new("\n\n"));
static BLANK_CRLF: LazyLock<memmem::Finder<'static>> =
    LazyLock::new(|| memmem::Finder::new("\n\r\n"));

/// Whole events of a stream without the one that has nothing but usage.
pub(super) fn without_usage(events: Bytes) -> Bytes {
    if !has_usage(&events) {
        return events;
    }
    let mut kept = BytesMut::new();
    let (mut position, mut is_changed) = (0, false);
    while position < events.len() {
        let rest = &events[position..];
        let ends = [(&BLANK, 2), (&BLANK_CRLF, 3)];
        let ends = ends.map(|(blank, length)| blank.find(rest).map(|found| found + length));
        let end = ends.into_iter().flatten().min().unwrap_or(rest.len());
        match is_usage(&rest[..end]) {
            true => is_changed = true,
            false => kept.extend_from_slice(&rest[..end]),
        }
        position += end;
    }
    match is_changed {
        true => kept.freeze(),
        false => events,
    }
}

/// True for an event with usage and an empty list of choices.
fn is_usage(event: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Chunk {
        choices: Vec<IgnoredAny>,
        #[serde(default)]
        usage: Option<IgnoredAny>,
    }
    let mut lines = event.split(|byte| *byte == b'\n');
    let data = lines.find_map(|line| line.strip_prefix(b"data:"));
    let chunk = data.and_then(|data| serde_json::from_slice::<Chunk>(data).ok());
    chunk.is_some_and(|chunk| chunk.choices.is_empty() && chunk.usage.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt;
    use crate::relay::body_edit::applied;

    fn check(body: &str, expected: Option<&str>) {
        let body = Bytes::copy_from_slice(body.as_bytes());
        let peek = prompt::peek(Api::Chat, &body, 64).unwrap();
        let edit = asking(Api::Chat, &body, &peek);
        let asked = edit.map(|edit| applied(&body, &mut [edit]));
        let asked = asked.as_deref().map(|it| str::from_utf8(it).unwrap());
        assert_eq!(asked, expected);
    }

    #[test]
    fn usage_is_asked_for_where_the_client_did_not() {
        check(
            r#"{"stream":true,"n":1.0}"#,
            Some(r#"{"stream":true,"n":1.0,"stream_options":{"include_usage":true}}"#),
        );
        check(
            r#"{"stream_options": null ,"stream":true}"#,
            Some(r#"{"stream_options": {"include_usage":true} ,"stream":true}"#),
        );
        check(
            r#"{"stream":true,"stream_options":{"include_usage":false,"x":[1]}}"#,
            Some(r#"{"stream":true,"stream_options":{"include_usage":true,"x":[1]}}"#),
        );
        check(
            r#"{"stream":true,"stream_options":{"include_usage": true}}"#,
            None,
        );
        // The engine refuses it.
        check(r#"{"stream":true,"stream_options":7}"#, None);
        check(r#"{"n":1}"#, None);
        let peek = prompt::peek(Api::Responses, br#"{"stream":true}"#, 64).unwrap();
        assert_eq!(asking(Api::Responses, br#"{"stream":true}"#, &peek), None);
    }

    #[test]
    fn only_the_event_with_usage_alone_is_left_out() {
        let token = "data: {\"choices\":[{\"delta\":{\"content\":\"\\\"usage\\\": \"}}]}\n\n";
        let continuous = "data: {\"choices\":[{}],\"usage\":{\"prompt_tokens\":1}}\n\n";
        let null = "data: {\"choices\":[],\"usage\":null}\n\n";
        let usage = "data: {\"id\":\"x\",\"choices\":[],\"usage\":{\"prompt_tokens\":1}}\n\n";
        let done = "data: [DONE]\n\n";
        let check = |events: &str, expected: &str| {
            let found = without_usage(Bytes::copy_from_slice(events.as_bytes()));
            assert_eq!(str::from_utf8(&found).unwrap(), expected);
        };
        let all = [token, continuous, null, usage, done].concat();
        check(&all, &[token, continuous, null, done].concat());
        check(usage, "");
        check(
            &all.replace('\n', "\r\n"),
            &[token, continuous, null, done]
                .concat()
                .replace('\n', "\r\n"),
        );
        check(": ping\n\n", ": ping\n\n");
        check("data: \"usage\":", "data: \"usage\":");
    }
}
