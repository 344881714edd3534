//! Checks the types and bounds of a create's members, so that a wrong one is refused by name before anything is
//! promised or computed: a background response is accepted before an engine sees it, and engines ignore some mistakes.
//! Pure.
//!
//! Bounds are those of OpenAI's reference where vLLM has the same, else the wider of the two.

use super::known_json;
use super::member_table::{self, ANY, Shape};
use super::members::{self, Members};
use crate::openai::error::ApiError;

/// The first member with a wrong type or value, by name.
pub(super) fn check(all: &Members<'_>) -> Result<(), ApiError> {
    for (name, raw) in all.iter().filter(|(_, raw)| *raw != "null") {
        match name {
            "tools" => check_tools(name, raw)?,
            "tool_choice" => check_tool_choice(raw)?,
            "text" => check_text(raw)?,
            "reasoning" => check_reasoning(raw)?,
            "stream_options" => {
                member(
                    &object(name, raw)?,
                    name,
                    "include_obfuscation",
                    &Shape::Flag,
                )?;
            }
            _ => {
                if let Some(member) = member_table::member(name) {
                    check_shape(name, raw, &member.shape)?;
                }
            }
        }
    }
    let unsupported = |object: &str, name: &str, why: &str| {
        let has = all.get(object).and_then(|raw| Members::parse(raw).ok());
        if has.is_some_and(|members| members.get(name).is_some()) {
            Err(ApiError::unsupported(&format!("{object}.{name}"), why))
        } else {
            Ok(())
        }
    };
    unsupported(
        "moderation",
        "policy",
        "is not supported: nothing moderates here",
    )?;
    unsupported(
        "background_options",
        "continuation_id",
        "is not supported: continue with `previous_response_id`",
    )
}

fn check_shape(param: &str, raw: &str, shape: &Shape) -> Result<(), ApiError> {
    let wrong = |expected: &str| Err(ApiError::wrong_type(param, expected));
    let outside = |why: String| Err(ApiError::wrong_value(param, why));
    match shape {
        Shape::Text if !raw.starts_with('"') => wrong("a string"),
        Shape::Flag if !matches!(raw, "true" | "false") => wrong("true or false"),
        Shape::Object if !raw.starts_with('{') => wrong("an object"),
        Shape::List if !raw.starts_with('[') => wrong("a list"),
        Shape::TextOrList if !raw.starts_with(['"', '[']) => wrong("a string or a list"),
        Shape::Any
        | Shape::Text
        | Shape::Flag
        | Shape::Object
        | Shape::List
        | Shape::TextOrList => Ok(()),
        Shape::Integer(min, max) => match integer(raw) {
            None => wrong("an integer"),
            Some(number) if (i128::from(*min)..=i128::from(*max)).contains(&number) => Ok(()),
            Some(_) if *max == i64::MAX => outside(format!("it must be at least {min}")),
            Some(_) => outside(format!("it must be from {min} to {max}")),
        },
        Shape::Number(min, max) | Shape::NumberAbove(min, max) => {
            let is_above = matches!(shape, Shape::NumberAbove(..));
            let Ok(number) = raw.parse::<f64>() else {
                return wrong("a number");
            };
            let is_within = (*min..=*max).contains(&number) && !(is_above && number == *min);
            match (is_within, is_above, *max == ANY) {
                (true, ..) => Ok(()),
                (false, true, true) => outside(format!("it must be above {min}")),
                (false, false, true) => outside(format!("it must be at least {min}")),
                (false, true, false) => {
                    outside(format!("it must be above {min} and at most {max}"))
                }
                (false, false, false) => outside(format!("it must be from {min} to {max}")),
            }
        }
        Shape::OneOf(known) => match members::text(raw) {
            None => wrong("a string"),
            Some(text) if known.contains(&&*text) => Ok(()),
            Some(text) => outside(format!("'{text}' is not one of '{}'", known.join("', '"))),
        },
    }
}

/// A number without a fraction, also as `16.0`, which engines take.
fn integer(raw: &str) -> Option<i128> {
    if let Ok(number) = raw.parse() {
        return Some(number);
    }
    let number: f64 = raw.parse().ok()?;
    (number.fract() == 0.0 && number.abs() < 1e18).then_some(number as i128)
}

fn object<'a>(param: &str, raw: &'a str) -> Result<Members<'a>, ApiError> {
    Members::parse(raw).map_err(|_| ApiError::wrong_type(param, "an object"))
}

/// Checks a member of the object `of` if it is there.
fn member(object: &Members<'_>, of: &str, name: &str, shape: &Shape) -> Result<(), ApiError> {
    match object.get(name) {
        Some(raw) => check_shape(&format!("{of}.{name}"), raw, shape),
        None => Ok(()),
    }
}

/// As [`member`], for one that must be there.
fn required(object: &Members<'_>, of: &str, name: &str, shape: &Shape) -> Result<(), ApiError> {
    match object.get(name) {
        Some(raw) => check_shape(&format!("{of}.{name}"), raw, shape),
        None => Err(ApiError::missing_parameter(&format!("{of}.{name}"))),
    }
}

/// Checks a list of tools. `param`: its name in errors.
pub(super) fn check_tools(param: &str, raw: &str) -> Result<(), ApiError> {
    each_tool(param, raw, |tool, of| {
        let kind = tool.text("type");
        if !matches!(kind.as_deref(), Some("function" | "custom")) {
            return Ok(());
        }
        required(tool, of, "name", &Shape::Text)?;
        member(tool, of, "description", &Shape::Text)?;
        member(tool, of, "parameters", &Shape::Object)?;
        member(tool, of, "strict", &Shape::Flag)
    })
}

/// Checks that `raw` is a list of objects that have a type. `check` sees each, with its name in errors.
fn each_tool(
    param: &str,
    raw: &str,
    check: impl Fn(&Members<'_>, &str) -> Result<(), ApiError>,
) -> Result<(), ApiError> {
    let wrong = || ApiError::wrong_type(param, "a list of tools");
    for (index, tool) in known_json::objects(raw).ok_or_else(wrong)?.enumerate() {
        let of = format!("{param}[{index}]");
        let tool = tool.ok_or_else(|| ApiError::wrong_type(&of, "an object"))?;
        required(&tool, &of, "type", &Shape::Text)?;
        check(&tool, &of)?;
    }
    Ok(())
}

fn check_tool_choice(raw: &str) -> Result<(), ApiError> {
    const PARAM: &str = "tool_choice";
    if raw.starts_with('"') {
        return check_shape(PARAM, raw, &Shape::OneOf(&["none", "auto", "required"]));
    }
    let choice =
        Members::parse(raw).map_err(|_| ApiError::wrong_type(PARAM, "a string or an object"))?;
    required(&choice, PARAM, "type", &Shape::Text)?;
    match choice.text("type").as_deref() {
        Some("function" | "custom") => required(&choice, PARAM, "name", &Shape::Text),
        Some("allowed_tools") => {
            member(&choice, PARAM, "mode", &Shape::OneOf(&["auto", "required"]))?;
            required(&choice, PARAM, "tools", &Shape::List)?;
            let tools = choice.get("tools").unwrap_or("[]");
            each_tool("tool_choice.tools", tools, |_, _| Ok(()))
        }
        Some("programmatic_tool_calling") => Err(ApiError::unsupported(
            PARAM,
            "of type 'programmatic_tool_calling' is not supported: name a function",
        )),
        _ => Ok(()),
    }
}

fn check_text(raw: &str) -> Result<(), ApiError> {
    let text = object("text", raw)?;
    member(
        &text,
        "text",
        "verbosity",
        &Shape::OneOf(&["low", "medium", "high"]),
    )?;
    let Some(raw) = text.get("format") else {
        return Ok(());
    };
    const OF: &str = "text.format";
    let format = object(OF, raw)?;
    let kinds = &["text", "json_object", "json_schema"];
    required(&format, OF, "type", &Shape::OneOf(kinds))?;
    if format.get("type") == Some("\"json_schema\"") {
        required(&format, OF, "name", &Shape::Text)?;
        required(&format, OF, "schema", &Shape::Object)?;
        member(&format, OF, "strict", &Shape::Flag)?;
    }
    Ok(())
}

fn check_reasoning(raw: &str) -> Result<(), ApiError> {
    const OF: &str = "reasoning";
    const EFFORTS: &[&str] = &["none", "minimal", "low", "medium", "high", "xhigh", "max"];
    const SUMMARIES: &[&str] = &["auto", "concise", "detailed"];
    let reasoning = object(OF, raw)?;
    member(&reasoning, OF, "effort", &Shape::OneOf(EFFORTS))?;
    member(&reasoning, OF, "summary", &Shape::OneOf(SUMMARIES))?;
    member(&reasoning, OF, "generate_summary", &Shape::OneOf(SUMMARIES))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `expected`: the error's code and parameter with a space between; empty for members that are all right.
    fn check(members: &str, expected: &str) {
        let found = match super::check(&Members::parse(members).unwrap()) {
            Ok(()) => String::new(),
            Err(error) => format!("{} {}", error.code, error.param_or_empty()),
        };
        assert_eq!(found, expected, "{members}");
    }

    #[test]
    fn what_clients_send_passes() {
        for members in [
            r#"{"temperature":0,"top_p":1.0,"top_logprobs":20,"max_output_tokens":16.0,"max_tool_calls":1,"seed":-1}"#,
            r#"{"temperature":null,"tools":null,"tool_choice":null,"text":null,"reasoning":null,"user":null}"#,
            r#"{"tools":[{"type":"function","name":"f","parameters":null,"strict":true},{"type":"web_search"}]}"#,
            r#"{"tool_choice":{"type":"function","name":"f"}}"#,
            r#"{"tool_choice":{"type":"allowed_tools","mode":"required","tools":[{"type":"function","name":"f"}]}}"#,
            r#"{"tool_choice":{"type":"allowed_tools","tools":[{"type":"mcp","server_label":"s"},{"type":"image_generation"}]}}"#,
            r#"{"tool_choice":{"type":"allowed_tools","tools":[]}}"#,
            r#"{"text":{"format":{"type":"json_schema","name":"n","schema":{},"strict":false},"verbosity":"low"}}"#,
            r#"{"reasoning":{"effort":"xhigh","summary":"auto"},"stream_options":{"include_obfuscation":false}}"#,
            r#"{"stop":["a"],"top_k":-1,"presence_penalty":-2,"prompt_cache_retention":"24h","moderation":{}}"#,
            r#"{"temperature":2.5,"unknown":{"anything":1}}"#,
        ] {
            check(members, "");
        }
    }

    #[test]
    fn each_wrong_member_is_refused_by_name() {
        for (members, expected) in [
            (r#"{"temperature":"hot"}"#, "invalid_type temperature"),
            (r#"{"temperature":-1}"#, "invalid_value temperature"),
            (r#"{"temperature":true}"#, "invalid_type temperature"),
            (r#"{"top_p":0}"#, "invalid_value top_p"),
            (r#"{"top_p":1.1}"#, "invalid_value top_p"),
            (r#"{"top_logprobs":21}"#, "invalid_value top_logprobs"),
            (r#"{"top_logprobs":1.5}"#, "invalid_type top_logprobs"),
            (
                r#"{"max_output_tokens":0}"#,
                "invalid_value max_output_tokens",
            ),
            (
                r#"{"max_output_tokens":"8"}"#,
                "invalid_type max_output_tokens",
            ),
            (r#"{"max_tool_calls":-1}"#, "invalid_value max_tool_calls"),
            (
                r#"{"presence_penalty":3}"#,
                "invalid_value presence_penalty",
            ),
            (
                r#"{"parallel_tool_calls":1}"#,
                "invalid_type parallel_tool_calls",
            ),
            (r#"{"user":7}"#, "invalid_type user"),
            (r#"{"service_tier":[]}"#, "invalid_type service_tier"),
            (
                r#"{"prompt_cache_retention":"1h"}"#,
                "invalid_value prompt_cache_retention",
            ),
            (
                r#"{"prompt_cache_options":"x"}"#,
                "invalid_type prompt_cache_options",
            ),
            (r#"{"stream_options":[]}"#, "invalid_type stream_options"),
            (
                r#"{"stream_options":{"include_obfuscation":1}}"#,
                "invalid_type stream_options.include_obfuscation",
            ),
            (r#"{"tools":{}}"#, "invalid_type tools"),
            (r#"{"tools":["f"]}"#, "invalid_type tools[0]"),
            (
                r#"{"tools":[{}]}"#,
                "missing_required_parameter tools[0].type",
            ),
            (
                r#"{"tools":[{"type":"function"}]}"#,
                "missing_required_parameter tools[0].name",
            ),
            (
                r#"{"tools":[{"type":"function","name":"f","parameters":[]}]}"#,
                "invalid_type tools[0].parameters",
            ),
            (r#"{"tool_choice":"some"}"#, "invalid_value tool_choice"),
            (r#"{"tool_choice":7}"#, "invalid_type tool_choice"),
            (
                r#"{"tool_choice":{"type":"function"}}"#,
                "missing_required_parameter tool_choice.name",
            ),
            (
                r#"{"tool_choice":{"type":"allowed_tools","mode":"none","tools":[]}}"#,
                "invalid_value tool_choice.mode",
            ),
            (
                r#"{"tool_choice":{"type":"allowed_tools"}}"#,
                "missing_required_parameter tool_choice.tools",
            ),
            (
                r#"{"tool_choice":{"type":"allowed_tools","tools":{}}}"#,
                "invalid_type tool_choice.tools",
            ),
            (
                r#"{"tool_choice":{"type":"allowed_tools","tools":[{"type":"function","name":"f"},"g"]}}"#,
                "invalid_type tool_choice.tools[1]",
            ),
            (
                r#"{"tool_choice":{"type":"allowed_tools","tools":[{"name":"f"}]}}"#,
                "missing_required_parameter tool_choice.tools[0].type",
            ),
            (
                r#"{"tool_choice":{"type":"allowed_tools","tools":[{"type":7}]}}"#,
                "invalid_type tool_choice.tools[0].type",
            ),
            (
                r#"{"tool_choice":{"type":"programmatic_tool_calling"}}"#,
                "unsupported_parameter tool_choice",
            ),
            (r#"{"text":"x"}"#, "invalid_type text"),
            (
                r#"{"text":{"verbosity":"loud"}}"#,
                "invalid_value text.verbosity",
            ),
            (
                r#"{"text":{"format":{"type":"xml"}}}"#,
                "invalid_value text.format.type",
            ),
            (
                r#"{"text":{"format":{"type":"json_schema","name":"n"}}}"#,
                "missing_required_parameter text.format.schema",
            ),
            (r#"{"reasoning":"high"}"#, "invalid_type reasoning"),
            (
                r#"{"reasoning":{"effort":"much"}}"#,
                "invalid_value reasoning.effort",
            ),
            (
                r#"{"moderation":{"policy":"p"}}"#,
                "unsupported_parameter moderation.policy",
            ),
            (
                r#"{"background_options":{"continuation_id":"c"}}"#,
                "unsupported_parameter background_options.continuation_id",
            ),
        ] {
            check(members, expected);
        }
    }

    #[test]
    fn the_first_wrong_tool_of_a_long_list_is_named() {
        let tools = format!("[{}{{}}]", "{},".repeat((1 << 20) / 3));
        check(
            &format!(r#"{{"tools":{tools}}}"#),
            "missing_required_parameter tools[0].type",
        );
        check(
            &format!(r#"{{"tool_choice":{{"type":"allowed_tools","tools":{tools}}}}}"#),
            "missing_required_parameter tool_choice.tools[0].type",
        );
        // What follows the first one is not even JSON.
        let error = check_tools("tools", "[{},{").unwrap_err();
        assert_eq!(error.param_or_empty(), "tools[0].type");
    }
}
