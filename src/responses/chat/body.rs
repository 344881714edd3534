//! The body of a chat completion, from the Responses body that an engine would get. Pure.

use bytes::Bytes;

use super::messages;
use super::settings::{ChatSettings, SystemMessages};
use super::tools;
use crate::relay::{NotConvertible, ToolLoss};
use crate::responses::member_table::member;
use crate::responses::members::{Members, put, put_read, put_text};

const TEMPLATE_KWARGS: &str = "chat_template_kwargs";
const NO_EFFORT: &str = "\"none\"";

/// A chat completion that was made of a request.
#[derive(Debug)]
pub(in crate::responses) struct ChatBody {
    pub(in crate::responses) body: Bytes,
    pub(in crate::responses) replaced_arguments: u64,
}

/// Always for a streamed answer with usage, whatever the client asked for: there is one way to read an answer.
/// `refuses_later_system`: whether the template of the model fails on a system message after the head, if that is known.
pub(in crate::responses) fn chat_body(
    native: &[u8],
    settings: &ChatSettings,
    loss: ToolLoss,
    refuses_later_system: &dyn Fn(&str) -> bool,
) -> Result<ChatBody, NotConvertible> {
    let not_json = || NotConvertible::new("", "the body is not a JSON object");
    let text = std::str::from_utf8(native).map_err(|_| not_json())?;
    let native = Members::parse(text).map_err(|_| not_json())?;
    let mut out = Vec::with_capacity(text.len() + text.len() / 4 + 256);
    out.push(b'{');
    let effort = native.get("reasoning").and_then(|raw| {
        let reasoning = Members::parse(raw).ok()?;
        reasoning.get("effort")
    });
    let kwargs = (effort == Some(NO_EFFORT))
        .then(|| without_thinking(native.get(TEMPLATE_KWARGS)))
        .flatten();
    for (name, value) in native.iter() {
        let is_copied = member(name).is_none_or(|member| member.to_chat);
        if is_copied && (kwargs.is_none() || name != TEMPLATE_KWARGS) {
            put_read(&mut out, name, value);
        }
    }
    if let Some(limit) = native.get("max_output_tokens") {
        put(&mut out, settings.output_limit_name.member(), limit);
    }
    let choice = native.get("tool_choice");
    if let Some(list) = tools::chat_tools(native.get("tools"), settings.unsupported_tools, loss)? {
        put(&mut out, "tools", &list);
        if let Some(choice) = choice {
            let choice = tools::chat_choice(choice, settings.unsupported_tools, loss)?;
            put(&mut out, "tool_choice", &choice);
        }
        if let Some(parallel) = native.get("parallel_tool_calls") {
            put(&mut out, "parallel_tool_calls", parallel);
        }
    }
    if let Some(format) = native.get("text").and_then(response_format) {
        put(&mut out, "response_format", &format);
    }
    if let Some(effort) = effort {
        put(&mut out, "reasoning_effort", effort);
    }
    if let Some(kwargs) = kwargs {
        put(&mut out, TEMPLATE_KWARGS, &kwargs);
    }
    if tools::asks_for_logprobs(&native) {
        put(&mut out, "logprobs", "true");
        if let Some(count) = native.get("top_logprobs") {
            put(&mut out, "top_logprobs", count);
        }
    }
    put(&mut out, "stream", "true");
    put(&mut out, "stream_options", r#"{"include_usage":true}"#);
    put(&mut out, "messages", "");
    let input = native.get("input").unwrap_or("[]");
    let merges_later = || match settings.system_messages {
        SystemMessages::InPlace => false,
        SystemMessages::MergeIntoFirst => true,
        SystemMessages::Auto => {
            refuses_later_system(native.text("model").as_deref().unwrap_or_default())
        }
    };
    let instructions = native.get("instructions");
    let written = messages::write(&mut out, instructions, input, settings, &merges_later)?;
    if written.continues {
        put(&mut out, "continue_final_message", "true");
        put(&mut out, "add_generation_prompt", "false");
    }
    out.push(b'}');
    Ok(ChatBody {
        body: out.into(),
        replaced_arguments: written.replaced_arguments,
    })
}

/// The variables of the template for an answer without reasoning: engines of this time derive them from
/// `reasoning_effort`, older ones do not. `None` if the client decided, or sent what no engine accepts.
fn without_thinking(kwargs: Option<&str>) -> Option<String> {
    let Some(kwargs) = kwargs.filter(|raw| *raw != "null") else {
        return Some(r#"{"enable_thinking":false}"#.to_owned());
    };
    let members = Members::parse(kwargs).ok()?;
    if members.get("enable_thinking").is_some() {
        return None;
    }
    let mut out = br#"{"enable_thinking":false"#.to_vec();
    for (name, value) in members.iter() {
        put_read(&mut out, name, value);
    }
    out.push(b'}');
    String::from_utf8(out).ok()
}

/// `text.format` as `response_format`; `None` for plain text.
fn response_format(text: &str) -> Option<String> {
    let text = Members::parse(text).ok()?;
    let format = Members::parse(text.get("format")?).ok()?;
    let kind = format.text("type")?;
    let mut out = Vec::new();
    out.extend_from_slice(br#"{"type":"#);
    put_text(&mut out, &kind);
    match &*kind {
        "text" => return None,
        "json_schema" => {
            put(&mut out, "json_schema", "{");
            for name in ["name", "description", "schema", "strict"] {
                if let Some(value) = format.get(name) {
                    put(&mut out, name, value);
                }
            }
            out.push(b'}');
        }
        _ => {}
    }
    out.push(b'}');
    String::from_utf8(out).ok()
}
