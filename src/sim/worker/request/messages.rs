//! Requests of Anthropic's Messages: read as the chat completions that engines make of them. Pure.

use serde_json::{Value, json};

use super::checks::{check_model, from_json, missing_field};
use super::turns::conversation;
use crate::prompt::render;
use crate::sim::worker::error::ApiError;
use crate::sim::worker::tokenizer;

/// Fields that mean the same for both APIs.
const SHARED: [&str; 7] = [
    "model",
    "max_tokens",
    "stream",
    "cache_salt",
    "kv_transfer_params",
    "ignore_eos",
    "session_id",
];

pub(super) fn as_chat(body: &[u8]) -> Result<Value, ApiError> {
    let whole: Value = from_json(body)?;
    for name in ["messages", "max_tokens"] {
        if whole.get(name).is_none() {
            return Err(missing_field(name, body));
        }
    }
    let mut chat = converted(body)?;
    for name in SHARED {
        if let Some(value) = whole.get(name) {
            chat[name] = value.clone();
        }
    }
    chat["reasoning_effort"] = match whole["thinking"]["type"].as_str() {
        Some("enabled" | "adaptive") => "low".into(),
        _ => "none".into(),
    };
    let choice = &whole["tool_choice"];
    chat["tool_choice"] = match choice["type"].as_str() {
        Some("any") => "required".into(),
        Some("none") => "none".into(),
        Some("tool") => json!({"type": "function", "function": {"name": choice["name"]}}),
        _ => "auto".into(),
    };
    Ok(chat)
}

fn converted(body: &[u8]) -> Result<Value, ApiError> {
    render::chat_of_messages(body).map_err(|error| ApiError::bad_request(error.to_string()))
}

/// The number of a prompt's tokens.
pub(crate) fn count(body: &[u8], models: &[String]) -> Result<usize, ApiError> {
    let chat = converted(body)?;
    let whole: Value = from_json(body)?;
    let model = whole["model"].as_str().map(str::to_owned);
    check_model(model, models)?;
    let messages = chat["messages"].as_array().map_or(&[][..], Vec::as_slice);
    let turns = conversation(None, chat.get("tools"), messages)?;
    Ok(tokenizer::encode_turns(&turns).len())
}
