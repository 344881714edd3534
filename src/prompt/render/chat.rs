//! The body of a chat completion, as the variables of its chat template.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{Chat, Options, Unknown};

#[derive(Deserialize)]
struct Body {
    messages: Vec<Map<String, Value>>,
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

pub(super) fn read(body: &[u8], options: &Options) -> Result<Chat, Unknown> {
    let mut body: Body =
        serde_json::from_slice(body).map_err(|error| Unknown::Body(error.to_string()))?;
    if body.chat_template.is_some() {
        return Err(Unknown::Field("chat_template"));
    }
    if body.truncate_prompt_tokens.is_some() {
        return Err(Unknown::Field("truncate_prompt_tokens"));
    }
    for message in &mut body.messages {
        one_name_for_reasoning(message);
        order_calls(message);
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
    super::overrule(&mut kwargs, fields);
    super::overrule_effort(&mut kwargs, body.reasoning_effort);
    Ok(Chat {
        messages: body.messages,
        tools,
        kwargs,
        add_special_tokens: body.add_special_tokens.unwrap_or(false),
    })
}

/// The engine knows the older name, and goes on with the newer one.
fn one_name_for_reasoning(message: &mut Map<String, Value>) {
    let Some(older) = message.shift_remove("reasoning_content") else {
        return;
    };
    let is_said = message.get("reasoning").is_some_and(|it| !it.is_null());
    if !older.is_null() && !is_said {
        message.insert("reasoning".to_owned(), older);
    }
}

/// The engine's types put a call's keys into their own order, which a template that prints the call
/// as JSON shows.
fn order_calls(message: &mut Map<String, Value>) {
    let Some(Value::Array(calls)) = message.get_mut("tool_calls") else {
        return;
    };
    for call in calls.iter_mut().filter_map(Value::as_object_mut) {
        if let Some(Value::Object(function)) = call.get_mut("function") {
            *function = first(std::mem::take(function), &["arguments", "name"]);
        }
        *call = first(std::mem::take(call), &["id", "function", "type"]);
    }
}

fn first(mut map: Map<String, Value>, keys: &[&str]) -> Map<String, Value> {
    let mut ordered = Map::with_capacity(map.len());
    for key in keys {
        if let Some((key, value)) = map.shift_remove_entry(*key) {
            ordered.insert(key, value);
        }
    }
    ordered.extend(map);
    ordered
}

fn tool(tool: Value) -> Result<Value, Unknown> {
    let wrong = || Unknown::Refused("a tool that is not a function with a name".to_owned());
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
            let mut described = super::function_tool(function).ok_or_else(wrong)?;
            if let Some(defer) = defer {
                described.insert("defer_loading".to_owned(), defer);
            }
            Ok(Value::Object(described))
        }
        _ => Err(wrong()),
    }
}
