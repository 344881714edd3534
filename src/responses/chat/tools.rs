//! Tools of the Responses API as functions of a chat completion, and calls of those functions as calls of the tools.
//! Pure.

use std::borrow::Cow;
use std::collections::HashMap;

use super::settings::UnsupportedTools;
use crate::relay::{NotConvertible, ToolLoss};
use crate::responses::allowed_tools::{AllowedTools, qualified};
use crate::responses::known_json;
use crate::responses::member_table::ALLOWED_TOOLS;
use crate::responses::members::{self, Members, put, put_comma, put_string, put_text};

/// Named in a refusal that it decides.
const SETTING: &str = "(responses.chat.unsupported_tools)";
const NO_PARAMETERS: &str = r#"{"type":"object","properties":{}}"#;
/// Types of tools that are named when they are left out: each type of a request is compared with all that are named.
/// The header is cut earlier if they are long.
const MAX_LEFT_OUT: usize = 32;
/// Bytes of each of these names, of which a line of the log has all. OpenAI's types have 30 at most.
const LEFT_OUT_BYTES_MAX: usize = 64;
/// As vLLM shows a custom tool to the model.
const CUSTOM_PARAMETERS: &str = r#"{"type":"object","properties":{"input":{"type":"string","description":"The freeform text payload for this tool."}},"required":["input"],"additionalProperties":false}"#;

/// The list of functions, in the order of the tools; `None` if there is none.
pub(super) fn chat_tools(
    tools: Option<&str>,
    unsupported: UnsupportedTools,
    loss: ToolLoss,
) -> Result<Option<String>, NotConvertible> {
    let mut out = vec![b'['];
    for (index, tool) in known_json::each_object(tools).enumerate() {
        match &*tool.text("type").unwrap_or_default() {
            "function" | "custom" => put_tool(&mut out, "", &tool),
            "namespace" => {
                let namespace = tool.text("name").unwrap_or_default();
                for inner in known_json::each_object(tool.get("tools")) {
                    put_tool(&mut out, &namespace, &inner);
                }
            }
            _ if is_left_out(unsupported, loss) => {}
            kind => {
                let why = format!(
                    "tools of type '{kind}' cannot be sent to a worker that speaks chat completions only {SETTING}"
                );
                return Err(NotConvertible::new(&format!("tools[{index}]"), &why));
            }
        }
    }
    out.push(b']');
    let list = String::from_utf8(out).unwrap_or_default();
    Ok((list.len() > 2).then_some(list))
}

/// Whether a tool that a chat completion cannot have is left out.
fn is_left_out(unsupported: UnsupportedTools, loss: ToolLoss) -> bool {
    unsupported == UnsupportedTools::Ignore && loss == ToolLoss::AsConfigured
}

/// Writes a function or a custom tool, and nothing of any other.
fn put_tool(out: &mut Vec<u8>, namespace: &str, tool: &Members<'_>) {
    match tool.text("type").as_deref() {
        Some("function") => function(out, namespace, tool),
        Some("custom") => custom(out, namespace, tool),
        _ => {}
    }
}

fn begin(out: &mut Vec<u8>, name: &str, description: Option<&str>) {
    put_comma(out);
    out.extend_from_slice(br#"{"type":"function","function":{"name":"#);
    put_text(out, name);
    if let Some(description) = description {
        put(out, "description", description);
    }
}

fn function(out: &mut Vec<u8>, namespace: &str, tool: &Members<'_>) {
    let name = tool.text("name").unwrap_or_default();
    begin(out, &qualified(namespace, &name), tool.get("description"));
    let parameters = tool.get("parameters").unwrap_or(NO_PARAMETERS);
    put(out, "parameters", parameters);
    if let Some(strict) = tool.get("strict") {
        put(out, "strict", strict);
    }
    out.extend_from_slice(b"}}");
}

fn custom(out: &mut Vec<u8>, namespace: &str, tool: &Members<'_>) {
    let name = tool.text("name").unwrap_or_default();
    begin(out, &qualified(namespace, &name), tool.get("description"));
    put(out, "parameters", CUSTOM_PARAMETERS);
    out.extend_from_slice(b"}}");
}

/// `tool_choice`. Allowed tools are no filter of the list, which would change the prompt; the answer is checked instead.
pub(super) fn chat_choice(
    choice: &str,
    unsupported: UnsupportedTools,
    loss: ToolLoss,
) -> Result<Cow<'_, str>, NotConvertible> {
    let Ok(members) = Members::parse(choice) else {
        return Ok(Cow::Borrowed(choice));
    };
    match members.text("type").as_deref() {
        Some("function" | "custom") => {
            let namespace = members.text("namespace").unwrap_or_default();
            let name = members.text("name").unwrap_or_default();
            let mut out = br#"{"type":"function","function":{"name":"#.to_vec();
            put_text(&mut out, &qualified(&namespace, &name));
            out.extend_from_slice(b"}}");
            Ok(Cow::Owned(String::from_utf8(out).unwrap_or_default()))
        }
        _ if is_left_out(unsupported, loss) => Ok(Cow::Borrowed("\"auto\"")),
        kind => Err(NotConvertible::new(
            "tool_choice",
            &format!(
                "of type '{}' cannot be sent to a worker that speaks chat completions only {SETTING}",
                kind.unwrap_or_default()
            ),
        )),
    }
}

/// What a function of a chat is for the client.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tool {
    pub(super) is_custom: bool,
    /// Empty if it is in none.
    namespace: String,
    pub(super) name: String,
}

/// What reading the answer to a request needs of it.
#[derive(Clone, Debug, Default)]
pub(in crate::responses) struct AnsweredTools {
    /// By the name that the model knows.
    tools: HashMap<String, Tool>,
    pub(super) has_custom: bool,
    /// Types of tools that were left out: of many, the first ones, and of long names the beginning.
    pub(in crate::responses) left_out: Vec<String>,
    /// The functions that `allowed_tools` lists, if the request has it.
    pub(super) allowed: Option<AllowedTools>,
    /// Whether the answer is to be events.
    pub(in crate::responses) is_streamed: bool,
    /// Whether messages get a `phase`.
    pub(in crate::responses) marks_phases: bool,
    /// Whether the client gets the log probabilities of the text.
    pub(super) has_logprobs: bool,
}

impl AnsweredTools {
    /// What the answer to a request with this native body needs of it. What cannot be read was refused before.
    pub(in crate::responses) fn of(native: &[u8]) -> Self {
        let native = Members::of_bytes(native).unwrap_or_default();
        let mut tools = HashMap::new();
        let mut left_out: Vec<String> = Vec::new();
        for tool in known_json::each_object(native.get("tools")) {
            let name = tool.text("name").unwrap_or_default();
            match tool.text("type").as_deref() {
                Some("function" | "custom") => {
                    tools.insert(name.into_owned(), Tool::of(&tool, ""));
                }
                Some("namespace") => {
                    for inner in known_json::each_object(tool.get("tools")) {
                        let known = Tool::of(&inner, &name);
                        let qualified = qualified(&name, &known.name).into_owned();
                        tools.insert(qualified, known);
                    }
                }
                kind => {
                    let whole = kind.unwrap_or_default();
                    let kind = &whole[..whole.floor_char_boundary(LEFT_OUT_BYTES_MAX)];
                    let has_room = left_out.len() < MAX_LEFT_OUT;
                    if has_room && !left_out.iter().any(|known| known == kind) {
                        left_out.push(kind.to_owned());
                    }
                }
            }
        }
        Self {
            left_out,
            has_custom: tools.values().any(|tool| tool.is_custom),
            tools,
            allowed: AllowedTools::of(native.get(ALLOWED_TOOLS)),
            marks_phases: false,
            is_streamed: native.get("stream") == Some("true"),
            has_logprobs: asks_for_logprobs(&native),
        }
    }

    pub(super) fn knows(&self, function: &str) -> bool {
        self.tools.contains_key(function)
    }

    /// The tool that a function stands for. A function that no tool has passes as it is.
    pub(super) fn tool(&self, function: &str) -> Tool {
        let tool = self.tools.get(function).cloned();
        tool.unwrap_or_else(|| Tool {
            is_custom: false,
            namespace: String::new(),
            name: function.to_owned(),
        })
    }
}

impl Tool {
    fn of(tool: &Members<'_>, namespace: &str) -> Self {
        Self {
            is_custom: tool.text("type").as_deref() == Some("custom"),
            namespace: namespace.to_owned(),
            name: tool.text("name").unwrap_or_default().into_owned(),
        }
    }
}

/// Whether the native body asks for the log probabilities of the text.
pub(super) fn asks_for_logprobs(native: &Members<'_>) -> bool {
    let include = native.get("include").and_then(members::list);
    let mut include = include.into_iter().flatten();
    include.any(|member| member == r#""message.output_text.logprobs""#)
}

/// Writes the members of a call that depend on its tool, after its type.
pub(super) fn put_call(out: &mut Vec<u8>, tool: &Tool, call_id: &str) {
    put_string(out, "call_id", call_id);
    put_string(out, "name", &tool.name);
    if !tool.namespace.is_empty() {
        put_string(out, "namespace", &tool.namespace);
    }
}
