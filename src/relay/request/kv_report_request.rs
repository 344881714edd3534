//! Asks an engine to report again which blocks of a prompt it has cached: puts `vllm_xargs.kv_cache_report_mode` into
//! a request's body, whose other bytes stay. Pure.

use super::body_edit::Edit;

const MODE: &str = "kv_cache_report_mode";
const ASKING: &str = r#"{"kv_cache_report_mode":"full"}"#;

/// `xargs` is the value of `vllm_xargs` within `body`. `None` if it is no object or has the mode already.
pub(in crate::relay) fn asking(body: &[u8], xargs: Option<&str>) -> Option<Edit> {
    match xargs {
        None => Edit::first_field(body, body, "vllm_xargs", ASKING),
        Some(null @ "null") => Edit::of_value(body, null, ASKING.to_owned()),
        // Even a null there would win over our value. An escape might hide the name.
        Some(xargs) if xargs.contains(MODE) || xargs.contains('\\') => None,
        Some(xargs) => Edit::first_field(body, xargs.as_bytes(), MODE, r#""full""#),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use serde_json::{Value, json};

    use super::*;
    use crate::prompt::{self, Api};
    use crate::relay::request::body_edit::applied;

    fn asked(body: &str) -> Option<String> {
        let peek = prompt::peek(Api::Completions, body.as_bytes(), 64).unwrap();
        let edit = asking(body.as_bytes(), peek.vllm_xargs)?;
        let body = Bytes::copy_from_slice(body.as_bytes());
        Some(String::from_utf8(applied(&body, &mut [edit]).to_vec()).unwrap())
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
