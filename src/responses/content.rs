//! Parts of an input item's content: checks them, and adds the members that clients require of a listed item. Pure.

use super::known_json;
use super::members::{self, Members, put, put_comma, put_read};
use crate::openai::error::ApiError;

/// The members that a part must have as text, and those that are added with a default if they are missing.
struct Part {
    texts: &'static [&'static str],
    defaults: &'static [(&'static str, &'static str)],
}

fn part(kind: &str) -> Option<Part> {
    let (texts, defaults): (
        &'static [&'static str],
        &'static [(&'static str, &'static str)],
    ) = match kind {
        "input_text" | "text" | "summary_text" | "reasoning_text" => (&["text"], &[]),
        "output_text" => (&["text"], &[("annotations", "[]"), ("logprobs", "[]")]),
        "refusal" => (&["refusal"], &[]),
        "input_image" => (&[], &[("detail", "\"auto\"")]),
        _ => return None,
    };
    Some(Part { texts, defaults })
}

/// The list `raw` with complete parts. `path`: its name in errors. Other engines' kinds of parts pass as they are.
pub(super) fn complete(raw: &str, path: &dyn Fn() -> String) -> Result<String, ApiError> {
    let wrong = || ApiError::wrong_type(&path(), "a string or a list of parts");
    let parts = known_json::objects(raw).ok_or_else(wrong)?;
    let mut out = Vec::with_capacity(raw.len() + 64);
    out.push(b'[');
    for (index, members) in parts.enumerate() {
        let wrong = || ApiError::wrong_type(&format!("{}[{index}]", path()), "an object");
        let members = members.ok_or_else(wrong)?;
        let at = |name: &str| format!("{}[{index}].{name}", path());
        let kind = match members.get("type") {
            None => return Err(ApiError::missing_parameter(&at("type"))),
            Some(raw) => {
                members::text(raw).ok_or_else(|| ApiError::wrong_type(&at("type"), "a string"))?
            }
        };
        let part = part(&kind);
        let texts = part.iter().flat_map(|part| part.texts);
        for name in texts {
            required_text(&members, name, &at)?;
        }
        if kind == "input_image" {
            check_image(&members, &at)?;
        }
        let defaults = part.map(|part| part.defaults).unwrap_or_default();
        let is_default = |name: &str| defaults.iter().any(|(known, _)| *known == name);
        put_comma(&mut out);
        out.push(b'{');
        for (name, value) in members.iter() {
            // Some clients write null for what they leave out, which engines refuse.
            if value != "null" || !is_default(name) {
                put_read(&mut out, name, value);
            }
        }
        for (name, value) in defaults {
            if members.get(name).is_none() {
                put(&mut out, name, value);
            }
        }
        out.push(b'}');
    }
    out.push(b']');
    Ok(String::from_utf8(out).unwrap_or_default())
}

/// The JSON of a text that must be there. `at`: the name of a member in errors.
pub(super) fn required_text<'a>(
    members: &Members<'a>,
    name: &str,
    at: &dyn Fn(&str) -> String,
) -> Result<&'a str, ApiError> {
    match members.get(name) {
        None => Err(ApiError::missing_parameter(&at(name))),
        Some(raw) if !raw.starts_with('"') => Err(ApiError::wrong_type(&at(name), "a string")),
        Some(raw) => Ok(raw),
    }
}

fn check_image(members: &Members<'_>, at: &dyn Fn(&str) -> String) -> Result<(), ApiError> {
    const DETAILS: [&str; 4] = ["\"auto\"", "\"low\"", "\"high\"", "\"original\""];
    if let Some(detail) = members.get("detail")
        && !DETAILS.contains(&detail)
    {
        let why = "it must be 'auto', 'low', 'high' or 'original'";
        return Err(ApiError::wrong_value(&at("detail"), why));
    }
    match members.get("image_url") {
        None if members.get("file_id").is_some() => {
            let why = "is not supported: send the image as `image_url`, for example a data URL";
            Err(ApiError::unsupported(&at("file_id"), why))
        }
        _ => required_text(members, "image_url", at).map(|_| ()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completed(raw: &str) -> Result<String, String> {
        complete(raw, &|| "input[0].content".to_owned())
            .map_err(|error| format!("{} {}", error.code, error.param_or_empty()))
    }

    #[test]
    fn missing_members_get_their_defaults_and_others_pass_as_written() {
        for (raw, expected) in [
            (r#"[]"#, r#"[]"#),
            (
                r#"[{"type":"input_text", "text":"a\u0062"}]"#,
                r#"[{"type":"input_text","text":"a\u0062"}]"#,
            ),
            (
                r#"[{"type":"input_image","image_url":"data:,"},{"type":"input_image","image_url":"u","detail":"low"}]"#,
                r#"[{"type":"input_image","image_url":"data:,","detail":"auto"},{"type":"input_image","image_url":"u","detail":"low"}]"#,
            ),
            (
                r#"[{"type":"input_image","detail":null,"image_url":"u","file_id":null}]"#,
                r#"[{"type":"input_image","image_url":"u","file_id":null,"detail":"auto"}]"#,
            ),
            (
                r#"[{"type":"output_text","annotations":null,"logprobs":null,"text":"x"}]"#,
                r#"[{"type":"output_text","text":"x","annotations":[],"logprobs":[]}]"#,
            ),
            (
                r#"[{"type":"output_text","text":"x"}]"#,
                r#"[{"type":"output_text","text":"x","annotations":[],"logprobs":[]}]"#,
            ),
            (
                r#"[{"type":"input_audio","input_audio":{"data":"AA=="}}]"#,
                r#"[{"type":"input_audio","input_audio":{"data":"AA=="}}]"#,
            ),
        ] {
            assert_eq!(completed(raw).unwrap(), expected);
        }
    }

    #[test]
    fn a_wrong_part_is_refused_by_name() {
        for (raw, expected) in [
            ("[1]", "invalid_type input[0].content[0]"),
            ("[[]]", "invalid_type input[0].content[0]"),
            (
                r#"[{"type":"input_text","text":"a"},1]"#,
                "invalid_type input[0].content[1]",
            ),
            ("{}", "invalid_type input[0].content"),
            ("7", "invalid_type input[0].content"),
            (
                "[{}]",
                "missing_required_parameter input[0].content[0].type",
            ),
            (r#"[{"type":7}]"#, "invalid_type input[0].content[0].type"),
            (
                r#"[{"type":"input_text"}]"#,
                "missing_required_parameter input[0].content[0].text",
            ),
            (
                r#"[{"type":"input_text","text":7}]"#,
                "invalid_type input[0].content[0].text",
            ),
            (
                r#"[{"type":"input_image","image_url":{}}]"#,
                "invalid_type input[0].content[0].image_url",
            ),
            (
                r#"[{"type":"input_image","image_url":"u","detail":"max"}]"#,
                "invalid_value input[0].content[0].detail",
            ),
            (
                r#"[{"type":"input_image","file_id":"f"}]"#,
                "unsupported_parameter input[0].content[0].file_id",
            ),
        ] {
            assert_eq!(completed(raw).unwrap_err(), expected, "{raw}");
        }
    }

    #[test]
    fn a_long_list_is_read_to_its_first_wrong_part_only() {
        // What follows the parts is not even JSON.
        let parts = format!("[{}not JSON", "{},".repeat((1 << 20) / 3));
        assert_eq!(
            completed(&parts).unwrap_err(),
            "missing_required_parameter input[0].content[0].type"
        );
        let parts = format!("[7,{}not JSON", "{},".repeat((1 << 20) / 3));
        assert_eq!(
            completed(&parts).unwrap_err(),
            "invalid_type input[0].content[0]"
        );
    }
}
