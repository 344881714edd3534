//! Asks an engine to report again which blocks of a prompt it has cached: puts `vllm_xargs.kv_cache_report_mode` into
//! a request's body, whose other bytes stay. Pure.

use std::ops::Range;

use bytes::Bytes;

const MODE: &str = r#""kv_cache_report_mode":"full""#;

/// The text to put into a body, and its position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::relay) struct KvReportRequest {
    /// The bytes that the text replaces; empty unless the client's own `vllm_xargs` is null.
    range: Range<usize>,
    text: String,
}

impl KvReportRequest {
    /// `xargs` is the value of `vllm_xargs` within `body`. `None` if it is no object or has the mode already.
    pub(in crate::relay) fn new(body: &[u8], xargs: Option<&str>) -> Option<Self> {
        let Some(xargs) = xargs else {
            let start = body.iter().position(|byte| *byte == b'{')? + 1;
            let is_empty = first_byte(body.get(start..)?)? == b'}';
            let comma = if is_empty { "" } else { "," };
            return Some(Self {
                range: start..start,
                text: format!(r#""vllm_xargs":{{{MODE}}}{comma}"#),
            });
        };
        let start = xargs.as_ptr().addr().checked_sub(body.as_ptr().addr())?;
        let is_part = start + xargs.len() <= body.len();
        let first = first_byte(xargs.as_bytes()).filter(|_| is_part)?;
        if xargs == "null" {
            return Some(Self {
                range: start..start + xargs.len(),
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
            range: start + 1..start + 1,
            text: format!("{MODE}{comma}"),
        })
    }

    pub(in crate::relay) fn put_into(&self, body: &[u8]) -> Bytes {
        let mut asking = Vec::with_capacity(body.len() + self.text.len());
        asking.extend_from_slice(&body[..self.range.start]);
        asking.extend_from_slice(self.text.as_bytes());
        asking.extend_from_slice(&body[self.range.end..]);
        asking.into()
    }
}

fn first_byte(text: &[u8]) -> Option<u8> {
    text.iter()
        .copied()
        .find(|byte| !byte.is_ascii_whitespace())
}

/// Even a null there would win over our value. An escape might hide the name.
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
        let report = KvReportRequest::new(body.as_bytes(), peek.vllm_xargs)?;
        let asking = report.put_into(body.as_bytes());
        Some(String::from_utf8(asking.to_vec()).unwrap())
    }

    #[test]
    fn the_mode_is_added_and_nothing_else_changes() {
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
            let mut sent: Value = serde_json::from_str(&found).unwrap();
            let xargs = sent["vllm_xargs"].as_object_mut().unwrap();
            assert_eq!(xargs.remove("kv_cache_report_mode"), Some(json!("full")));
        }
    }

    #[test]
    fn the_mode_is_not_added_where_it_would_have_no_effect() {
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
