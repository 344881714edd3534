//! Reads the body of a chat completion into the variables of the chat template.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::chat_message::Message;
use super::kwargs;
use super::types::{Options, TokenizeError};

/// A chat or Responses request as the variables of a chat template.
pub(super) struct ChatInput<'a> {
    pub(super) messages: Vec<Message<'a>>,
    pub(super) tools: Option<Vec<Value>>,
    /// The request's `chat_template_kwargs`, overridden by fields of the body.
    pub(super) kwargs: Map<String, Value>,
    pub(super) add_special_tokens: bool,
}

#[derive(Deserialize)]
struct Body<'a> {
    #[serde(borrow)]
    messages: Vec<Message<'a>>,
    #[serde(default)]
    tools: Option<Vec<Value>>,
    #[serde(default)]
    tool_choice: Option<Value>,
    #[serde(default)]
    documents: Option<Value>,
    #[serde(default)]
    reasoning_effort: Option<Value>,
    #[serde(default)]
    add_generation_prompt: Option<bool>,
    #[serde(default)]
    continue_final_message: Option<bool>,
    #[serde(default)]
    add_special_tokens: Option<bool>,
    #[serde(default)]
    chat_template_kwargs: Option<Map<String, Value>>,
    #[serde(default)]
    chat_template: Option<Value>,
    #[serde(default)]
    truncate_prompt_tokens: Option<Value>,
}

pub(super) fn read<'a>(body: &'a [u8], options: &Options) -> Result<ChatInput<'a>, TokenizeError> {
    let body = serde_json::from_slice(body);
    input(
        body.map_err(|error| TokenizeError::Body(error.to_string()))?,
        options,
    )
}

/// Of a body that was made of another API's.
pub(super) fn of_value(
    body: Value,
    options: &Options,
) -> Result<ChatInput<'static>, TokenizeError> {
    input(
        Body::deserialize(body).map_err(|error| TokenizeError::Body(error.to_string()))?,
        options,
    )
}

fn input<'a>(mut body: Body<'a>, options: &Options) -> Result<ChatInput<'a>, TokenizeError> {
    if body.chat_template.is_some() {
        return Err(TokenizeError::Field("chat_template"));
    }
    if body.truncate_prompt_tokens.is_some() {
        return Err(TokenizeError::Field("truncate_prompt_tokens"));
    }
    for message in &mut body.messages {
        if let Message::Object(message) = message {
            rename_reasoning_content(message);
            order_call_keys(message);
        }
    }
    let hides_tools = options.exclude_tools_when_tool_choice_none
        && body.tool_choice == Some(Value::String("none".to_owned()));
    let tools = match body.tools {
        Some(tools) if !hides_tools => {
            let tools: Result<_, _> = tools.into_iter().map(tool).collect();
            Some(tools?)
        }
        _ => None,
    };
    let mut kwargs = body.chat_template_kwargs.unwrap_or_default();
    let fields = [
        (
            "add_generation_prompt",
            body.add_generation_prompt.unwrap_or(true).into(),
        ),
        (
            "continue_final_message",
            body.continue_final_message.unwrap_or(false).into(),
        ),
        ("documents", body.documents.unwrap_or(Value::Null)),
    ];
    kwargs::override_with(&mut kwargs, fields);
    kwargs::override_effort(&mut kwargs, body.reasoning_effort);
    Ok(ChatInput {
        messages: body.messages,
        tools,
        kwargs,
        add_special_tokens: body.add_special_tokens.unwrap_or(false),
    })
}

/// Engines accept the older name `reasoning_content` and pass the message on with the newer one.
fn rename_reasoning_content(message: &mut Map<String, Value>) {
    let Some(older) = message.shift_remove("reasoning_content") else {
        return;
    };
    let has_newer = message.get("reasoning").is_some_and(|it| !it.is_null());
    if !older.is_null() && !has_newer {
        message.insert("reasoning".to_owned(), older);
    }
}

/// Puts the keys of tool calls in the order of the engine's types, for templates that print a call as JSON.
fn order_call_keys(message: &mut Map<String, Value>) {
    let Some(Value::Array(calls)) = message.get_mut("tool_calls") else {
        return;
    };
    for call in calls.iter_mut().filter_map(Value::as_object_mut) {
        if let Some(Value::Object(function)) = call.get_mut("function") {
            *function = with_first_keys(std::mem::take(function), &["arguments", "name"]);
        }
        *call = with_first_keys(std::mem::take(call), &["id", "function", "type"]);
    }
}

fn with_first_keys(mut map: Map<String, Value>, keys: &[&str]) -> Map<String, Value> {
    let mut ordered = Map::with_capacity(map.len());
    for key in keys {
        if let Some((key, value)) = map.shift_remove_entry(*key) {
            ordered.insert(key, value);
        }
    }
    ordered.extend(map);
    ordered
}

fn tool(tool: Value) -> Result<Value, TokenizeError> {
    let wrong = || TokenizeError::Refused("a tool without a named function".to_owned());
    let Value::Object(mut tool) = tool else {
        return Err(wrong());
    };
    let defer = tool
        .shift_remove("defer_loading")
        .filter(|it| !it.is_null());
    match tool.shift_remove("function") {
        Some(Value::Object(mut function)) => {
            if let Some(defer) = &defer
                && function.get("defer_loading").is_none_or(Value::is_null)
            {
                function.insert("defer_loading".to_owned(), defer.clone());
            }
            let mut shown = kwargs::function_tool(function).ok_or_else(wrong)?;
            if let Some(defer) = defer {
                shown.insert("defer_loading".to_owned(), defer);
            }
            Ok(Value::Object(shown))
        }
        _ => Err(wrong()),
    }
}
