//! Reads the body of a Responses request into the variables of the chat template: instructions, then input items. Several items may form
//! one assistant message (reasoning, text and calls).

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::chat::ChatInput;
use super::chat_message::Message;
use super::kwargs::{self, Kwargs};
use super::types::{Options, TokenizeError, refused};

#[derive(Deserialize)]
struct Body {
    input: Input,
    instructions: Option<String>,
    tools: Option<Vec<Map<String, Value>>>,
    tool_choice: Option<Value>,
    reasoning: Option<Map<String, Value>>,
    chat_template_kwargs: Option<Map<String, Value>>,
    previous_response_id: Option<Value>,
    previous_input_messages: Option<Value>,
    prompt: Option<Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Input {
    Text(String),
    Items(Vec<Map<String, Value>>),
}

pub(super) fn read(body: &[u8], options: &Options) -> Result<ChatInput<'static>, TokenizeError> {
    let body: Body = serde_json::from_slice(body)?;
    if body.previous_response_id.is_some() {
        return Err(TokenizeError::Field("previous_response_id"));
    }
    if body.previous_input_messages.is_some() {
        return Err(TokenizeError::Field("previous_input_messages"));
    }
    if body.prompt.is_some() {
        return Err(refused("prompt templates"));
    }
    let mut messages = Vec::new();
    if let Some(instructions) = body
        .instructions
        .filter(|instructions| !instructions.is_empty())
    {
        messages.push(message("system", "content", instructions.into()));
    }
    let continues = match body.input {
        Input::Text(text) => {
            messages.push(message("user", "content", text.into()));
            false
        }
        Input::Items(items) => {
            let continues = items.last().is_some_and(is_unfinished);
            // Items are merged into the messages of earlier items, never into the instructions.
            let first_item = messages.len();
            for item in items {
                append(&mut messages, first_item, item)?;
            }
            continues
        }
    };
    let hides_tools = options.exclude_tools_when_tool_choice_none
        && body.tool_choice == Some(Value::String("none".to_owned()));
    let tools = match body.tools {
        Some(tools) if !tools.is_empty() && !hides_tools => Some(functions(tools)?),
        _ => None,
    };
    let mut kwargs = Kwargs::new(body.chat_template_kwargs);
    let fields = [
        ("add_generation_prompt", (!continues).into()),
        ("continue_final_message", continues.into()),
    ];
    kwargs.override_with(fields);
    let effort = body
        .reasoning
        .and_then(|mut reasoning| reasoning.shift_remove("effort"));
    kwargs.override_effort(options.effort(effort));
    Ok(ChatInput {
        messages: messages.into_iter().map(Message::from).collect(),
        tools,
        kwargs,
        // Unlike chat, this API has no such field and the engine's default applies.
        add_special_tokens: true,
    })
}

fn message(role: &str, key: &str, value: Value) -> Map<String, Value> {
    let mut message = Map::with_capacity(3);
    message.insert("role".to_owned(), role.into());
    message.insert(key.to_owned(), value);
    message
}

/// Whether the model must continue this item instead of starting a new message.
fn is_unfinished(item: &Map<String, Value>) -> bool {
    let kind = item
        .get("type")
        .and_then(Value::as_str)
        .unwrap_or("message");
    let status = item.get("status").and_then(Value::as_str);
    matches!(kind, "message" | "reasoning") && matches!(status, Some("in_progress" | "incomplete"))
}

/// Appends an item as a message, or merges it into the last message if both are of one assistant turn. `first_item`
/// is the index of the first message that was made from an item.
fn append(
    messages: &mut Vec<Map<String, Value>>,
    first_item: usize,
    item: Map<String, Value>,
) -> Result<(), TokenizeError> {
    let kind = item.get("type").and_then(Value::as_str);
    let assistant = messages[first_item..]
        .last_mut()
        .filter(|message| message["role"] == "assistant");
    match kind {
        Some("function_call" | "custom_tool_call") => {
            let call = call(kind == Some("custom_tool_call"), &item)?;
            let calls = assistant.map(|message| {
                message
                    .entry("tool_calls")
                    .or_insert_with(|| Value::Array(Vec::new()))
            });
            match calls {
                Some(Value::Array(calls)) => calls.push(call),
                _ => messages.push(message("assistant", "tool_calls", vec![call].into())),
            }
        }
        Some("reasoning") => {
            let text = reasoning(&item)?;
            merge(messages, first_item, "reasoning", text);
        }
        Some("function_call_output" | "custom_tool_call_output") => {
            let output = item.get("output").cloned().unwrap_or(Value::Null);
            let mut answer = message("tool", "content", output);
            let id = item.get("call_id").cloned().unwrap_or(Value::Null);
            answer.insert("tool_call_id".to_owned(), id);
            messages.push(answer);
        }
        None | Some("message") if item.get("role").is_some_and(|role| role == "assistant") => {
            match first_text(item.get("content")) {
                Some(text) => merge(messages, first_item, "content", text),
                None => messages.push(item),
            }
        }
        None | Some("message") if item.contains_key("role") => messages.push(item),
        _ => return Err(refused("an input item of an unknown type")),
    }
    Ok(())
}

/// Adds a text to the last message if that is an assistant's without `key`, else to a new assistant message.
fn merge(messages: &mut Vec<Map<String, Value>>, first_item: usize, key: &str, text: String) {
    let last = messages[first_item..].last_mut().filter(|message| {
        message["role"] == "assistant" && message.get(key).is_none_or(Value::is_null)
    });
    match last {
        Some(last) => {
            last.insert(key.to_owned(), text.into());
        }
        None => messages.push(message("assistant", key, text.into())),
    }
}

/// Engines use only the first part of an assistant message.
fn first_text(content: Option<&Value>) -> Option<String> {
    match content? {
        Value::String(text) => Some(text.clone()),
        Value::Array(parts) => Some(parts.first()?.get("text")?.as_str()?.to_owned()),
        _ => None,
    }
}

fn reasoning(item: &Map<String, Value>) -> Result<String, TokenizeError> {
    if item
        .get("encrypted_content")
        .and_then(Value::as_str)
        .is_some_and(|text| !text.is_empty())
    {
        return Err(refused("encrypted reasoning"));
    }
    let first = |key: &str| match item.get(key) {
        Some(Value::Array(parts)) => parts.first().map(|part| part["text"].as_str()),
        _ => None,
    };
    match first("content").or_else(|| first("summary")) {
        Some(text) => text
            .map(str::to_owned)
            .ok_or_else(|| refused("reasoning without its text")),
        None => Ok(String::new()),
    }
}

fn call(is_custom: bool, item: &Map<String, Value>) -> Result<Value, TokenizeError> {
    let field = |key: &str| item.get(key).and_then(Value::as_str);
    let incomplete = || refused("a call without its id, name or arguments");
    let mut name = field("name").ok_or_else(incomplete)?.to_owned();
    let arguments = if is_custom {
        // The engine shows a custom tool to the model as a function with one string argument.
        json!({"input": field("input").unwrap_or_default()})
    } else {
        if let Some(namespace) = field("namespace").filter(|namespace| !namespace.is_empty()) {
            name = qualified_name(namespace, &name);
        }
        field("arguments").ok_or_else(incomplete)?.into()
    };
    Ok(json!({
        "id": field("call_id").ok_or_else(incomplete)?,
        "function": {"name": name, "arguments": arguments},
        "type": "function",
    }))
}

fn qualified_name(namespace: &str, name: &str) -> String {
    format!("{namespace}__{name}")
}

/// The tools that the model sees. Others run in the engine or are ignored.
fn functions(tools: Vec<Map<String, Value>>) -> Result<Vec<Value>, TokenizeError> {
    let incomplete = || refused("a tool without a name");
    let mut shown = Vec::with_capacity(tools.len());
    for tool in tools {
        match tool.get("type").and_then(Value::as_str) {
            Some("function") => shown.push(kwargs::function_tool(tool).ok_or_else(incomplete)?),
            Some("custom") => shown.push(custom(&tool).ok_or_else(incomplete)?),
            Some("namespace") => {
                let namespace = tool
                    .get("name")
                    .and_then(Value::as_str)
                    .ok_or_else(incomplete)?;
                let Some(Value::Array(inner)) = tool.get("tools") else {
                    return Err(refused("a namespace without tools"));
                };
                for inner in inner.iter().filter_map(Value::as_object) {
                    if inner.get("type").is_none_or(|kind| kind != "function") {
                        continue;
                    }
                    let mut inner = inner.clone();
                    let name = inner
                        .get("name")
                        .and_then(Value::as_str)
                        .ok_or_else(incomplete)?;
                    let name = qualified_name(namespace, name);
                    inner.insert("name".to_owned(), name.into());
                    shown.push(kwargs::function_tool(inner).ok_or_else(incomplete)?);
                }
            }
            _ => {}
        }
    }
    Ok(shown.into_iter().map(Value::Object).collect())
}

fn custom(tool: &Map<String, Value>) -> Option<Map<String, Value>> {
    let mut function = Map::with_capacity(3);
    function.insert("name".to_owned(), tool.get("name")?.clone());
    let description = tool.get("description").cloned().unwrap_or(Value::Null);
    function.insert("description".to_owned(), description);
    let parameters = json!({
        "type": "object",
        "properties": {
            "input": {
                "type": "string",
                "description": "The freeform text payload for this tool.",
            }
        },
        "required": ["input"],
        "additionalProperties": false,
    });
    function.insert("parameters".to_owned(), parameters);
    kwargs::function_tool(function)
}
