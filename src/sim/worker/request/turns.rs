//! Renders chat messages and Responses items as turns of text. Pure.
//!
//! Everything that a real chat template renders must be in the text, or different conversations would share blocks. So
//! everything that is not plain text is rendered as JSON.

use serde_json::Value;

use crate::sim::worker::error::ApiError;
use crate::sim::worker::tokenizer::Turn;

pub(super) fn conversation(
    instructions: Option<&str>,
    tools: Option<&Value>,
    items: &[Value],
) -> Result<Vec<Turn>, ApiError> {
    if items.is_empty() {
        let message =
            "Cannot apply chat template to an empty conversation. Provide at least one message.";
        return Err(ApiError::bad_request(message));
    }
    let system = |text: String| Turn {
        role: "system".to_owned(),
        text,
    };
    let tools = tools.filter(|tools| tools.as_array().is_none_or(|tools| !tools.is_empty()));
    let mut turns = Vec::with_capacity(items.len() + 2);
    turns.extend(tools.map(|tools| system(tools.to_string())));
    turns.extend(instructions.map(|text| system(text.to_owned())));
    turns.extend(items.iter().map(turn));
    Ok(turns)
}

/// Rejects the Responses items that vLLM rejects for a model with a plain chat template.
pub(super) fn check_item(item: &Value) -> Result<(), ApiError> {
    let kind = item["type"].as_str();
    match kind {
        None | Some("message" | "function_call" | "function_call_output") => Ok(()),
        Some("custom_tool_call" | "custom_tool_call_output") => Ok(()),
        Some("reasoning") if item["encrypted_content"].is_null() => Ok(()),
        Some("reasoning") => {
            let message = "Encrypted content is not supported.";
            Err(ApiError::bad_param("input", message))
        }
        Some(kind) => {
            let message = format!("Unsupported input item type: {kind}");
            Err(ApiError::bad_param("input", message))
        }
    }
}

fn turn(item: &Value) -> Turn {
    let Some(role) = item.get("role").and_then(Value::as_str) else {
        // A Responses item that is not a message: a function call, its output, reasoning.
        let role = item.get("type").and_then(Value::as_str).unwrap_or("user");
        return Turn {
            role: role.to_owned(),
            text: item.to_string(),
        };
    };
    let mut text = String::new();
    push_content(item.get("content").unwrap_or(&Value::Null), &mut text);
    for extra in ["tool_calls", "tool_call_id"] {
        if let Some(value) = item.get(extra) {
            text.push_str(&value.to_string());
        }
    }
    Turn {
        role: role.to_owned(),
        text,
    }
}

fn push_content(content: &Value, text: &mut String) {
    match content {
        Value::Null => {}
        Value::String(plain) => text.push_str(plain),
        Value::Array(parts) => {
            for part in parts {
                match part.get("text").and_then(Value::as_str) {
                    Some(plain) => text.push_str(plain),
                    None => text.push_str(&part.to_string()),
                }
            }
        }
        Value::Bool(_) | Value::Number(_) | Value::Object(_) => {
            text.push_str(&content.to_string());
        }
    }
}
