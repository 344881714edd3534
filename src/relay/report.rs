//! Asking an engine to tell again what it holds of a prompt: `vllm_xargs.kv_cache_report_mode`, put into
//! the body beside all that is there. Pure.

use std::ops::Range;

use bytes::Bytes;
use hyper::StatusCode;

const MODE: &str = r#""kv_cache_report_mode":"full""#;

/// Where a body gets it, and what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Report {
    /// What it takes the place of; empty but where the client's own is null.
    place: Range<usize>,
    text: String,
}

impl Report {
    /// For a body, an object, and its `vllm_xargs`, a part of it. None where it cannot be put there: they are
    /// no object, or name the mode themselves.
    pub(super) fn new(body: &[u8], xargs: Option<&str>) -> Option<Self> {
        let Some(xargs) = xargs else {
            let start = body.iter().position(|byte| *byte == b'{')? + 1;
            let is_empty = first_byte(body.get(start..)?)? == b'}';
            let comma = if is_empty { "" } else { "," };
            return Some(Self {
                place: start..start,
                text: format!(r#""vllm_xargs":{{{MODE}}}{comma}"#),
            });
        };
        let start = xargs.as_ptr().addr().checked_sub(body.as_ptr().addr())?;
        let is_part = start + xargs.len() <= body.len();
        let first = first_byte(xargs.as_bytes()).filter(|_| is_part)?;
        if xargs == "null" {
            return Some(Self {
                place: start..start + xargs.len(),
                text: format!("{{{MODE}}}"),
            });
        }
        if first != b'{' || names_mode(xargs) {
            return None;
        }
        let inside = xargs.strip_prefix('{')?;
        let is_empty = first_byte(inside.as_bytes())? == b'}';
        let comma = if is_empty { "" } else { "," };
        Some(Self {
            place: start + 1..start + 1,
            text: format!("{MODE}{comma}"),
        })
    }

    pub(super) fn put_into(&self, body: &[u8]) -> Bytes {
        let mut asking = Vec::with_capacity(body.len() + self.text.len());
        asking.extend_from_slice(&body[..self.place.start]);
        asking.extend_from_slice(self.text.as_bytes());
        asking.extend_from_slice(&body[self.place.end..]);
        asking.into()
    }
}

/// Whether an engine's answer may be about what was put into its request: it must be asked again without.
pub(super) fn may_be_refused(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY
    )
}

fn first_byte(text: &[u8]) -> Option<u8> {
    text.iter()
        .copied()
        .find(|byte| !byte.is_ascii_whitespace())
}

/// A null there is allowed, and would win; an escape might hide it.
fn names_mode(xargs: &str) -> bool {
    xargs.contains("kv_cache_report_mode") || xargs.contains('\\')
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::prompt::{self, Api};

    fn asked(body: &str) -> Option<String> {
        let peek = prompt::peek(Api::Completions, body.as_bytes(), 64).unwrap();
        let report = Report::new(body.as_bytes(), peek.vllm_xargs)?;
        let asking = report.put_into(body.as_bytes());
        Some(String::from_utf8(asking.to_vec()).unwrap())
    }

    #[test]
    fn it_stands_beside_what_the_client_sent_and_changes_nothing_else() {
        for (body, expected) in [
            (
                r#" { "prompt": [1], "x": 1.00}"#,
                r#" {"vllm_xargs":{"kv_cache_report_mode":"full"}, "prompt": [1], "x": 1.00}"#,
            ),
            ("{ }", r#"{"vllm_xargs":{"kv_cache_report_mode":"full"} }"#),
            (
                r#"{"vllm_xargs": {"a":"b"},"n":1}"#,
                r#"{"vllm_xargs": {"kv_cache_report_mode":"full","a":"b"},"n":1}"#,
            ),
            (
                r#"{"vllm_xargs":{ }}"#,
                r#"{"vllm_xargs":{"kv_cache_report_mode":"full" }}"#,
            ),
            (
                r#"{"vllm_xargs":null}"#,
                r#"{"vllm_xargs":{"kv_cache_report_mode":"full"}}"#,
            ),
            // Of two of a name, engines take the last.
            (
                r#"{"vllm_xargs":{"a":1},"vllm_xargs":{"b":2}}"#,
                r#"{"vllm_xargs":{"a":1},"vllm_xargs":{"kv_cache_report_mode":"full","b":2}}"#,
            ),
        ] {
            let found = asked(body).unwrap();
            assert_eq!(found, expected);
            let mut told: Value = serde_json::from_str(&found).unwrap();
            let xargs = told["vllm_xargs"].as_object_mut().unwrap();
            assert_eq!(xargs.remove("kv_cache_report_mode"), Some(json!("full")));
        }
    }

    #[test]
    fn it_is_not_put_where_it_would_not_count() {
        for body in [
            r#"{"vllm_xargs":7}"#,
            r#"{"vllm_xargs":[]}"#,
            r#"{"vllm_xargs":{"kv_cache_report_mode":null}}"#,
            r#"{"vllm_xargs":{"kv_cache_report_m\u006fde":null}}"#,
        ] {
            assert_eq!(asked(body), None, "{body}");
        }
    }
}
