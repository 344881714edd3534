//! Asks an engine to report again which blocks of a prompt it has cached: puts `vllm_xargs.kv_cache_report_mode` into
//! a request's body, whose other bytes stay. Pure.

use super::body_edit::Edit;

const MODE: &str = r#""kv_cache_report_mode":"full""#;

/// `xargs` is the value of `vllm_xargs` within `body`. `None` if it is no object or has the mode already.
pub(in crate::relay) fn asking(body: &[u8], xargs: Option<&str>) -> Option<Edit> {
    let Some(xargs) = xargs else {
        let start = body.iter().position(|byte| *byte == b'{')? + 1;
        let comma = comma_before(&body[start..])?;
        return Some(Edit {
            range: start..start,
            text: format!(r#""vllm_xargs":{{{MODE}}}{comma}"#),
        });
    };
    let text = match xargs.strip_prefix('{') {
        None if xargs == "null" => format!("{{{MODE}}}"),
        Some(members) if !names_mode(xargs) => {
            let comma = comma_before(members.as_bytes())?;
            format!("{{{MODE}{comma}{members}")
        }
        _ => return None,
    };
    Edit::of_value(body, xargs, text)
}

/// A comma, unless the object ends there.
fn comma_before(members: &[u8]) -> Option<&'static str> {
    let first = members.trim_ascii_start().first()?;
    Some(if *first == b'}' { "" } else { "," })
}

/// Even a null there would win over our value. An escape might hide the name.
fn names_mode(xargs: &str) -> bool {
    xargs.contains("kv_cache_report_mode") || xargs.contains('\\')
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use serde_json::{Value, json};

    use super::*;
    use crate::prompt::{self, Api};
    use crate::relay::request::body_edit::applied;

    fn asked(body: &str) -> Option<String> {
        let body = Bytes::copy_from_slice(body.as_bytes());
        let peek = prompt::peek(Api::Completions, &body, 64).unwrap();
        let asked = applied(&body, &mut [asking(&body, peek.vllm_xargs)?]);
        Some(String::from_utf8(asked.to_vec()).unwrap())
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
