//! The answers of Anthropic's Messages, whole and event by event, as vLLM 0.32 writes them. Pure.

use serde_json::{Value, json};

use super::items;
use crate::sim::worker::error::ApiError;
use crate::sim::worker::generation::Generation;
use crate::sim::worker::json::named_event;

pub(super) fn whole(generation: &Generation) -> Value {
    let request = &generation.request;
    let said = items::last_text(generation, 0);
    let mut content = Vec::new();
    if request.output.has_reasoning {
        let (thought, _) = items::words(generation, 0);
        content.push(json!({"type": "thinking", "thinking": thought, "signature": "sim"}));
    }
    content.push(match &request.output.call {
        None => json!({"type": "text", "text": said}),
        Some(call) => {
            let input: Value = serde_json::from_str(&said).unwrap_or_default();
            let id = items::id(generation, "toolu");
            json!({"type": "tool_use", "id": id, "name": call.name, "input": input})
        }
    });
    let mut message = json!({
        "id": request.id,
        "type": "message",
        "role": "assistant",
        "content": content,
        "model": request.model,
        "stop_reason": stop_reason(generation),
        "usage": usage(generation),
    });
    if let Some(params) = &generation.transfer_params {
        message["kv_transfer_params"] = json!(params);
    }
    message
}

/// The event before the first token. It does not know what is cached.
pub(super) fn opening(generation: &Generation) -> Vec<String> {
    let request = &generation.request;
    let message = json!({
        "id": request.id,
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": request.model,
        "stop_reason": null,
        "stop_sequence": null,
        "usage": {"input_tokens": request.prompt_tokens(), "output_tokens": 0},
    });
    vec![event("message_start", json!({ "message": message }))]
}

/// The events for the token that was added last.
pub(super) fn token(generation: &Generation, text: &str) -> String {
    let request = &generation.request;
    let index = generation.completion_tokens().saturating_sub(1);
    let thoughts = items::reasoning_tokens(generation);
    if index < thoughts {
        let mut events = String::new();
        if index == 0 {
            let block = json!({"type": "thinking", "thinking": "", "signature": ""});
            events += &start(0, &block);
        }
        return events + &delta(0, &json!({"type": "thinking_delta", "thinking": text}));
    }
    let mut events = String::new();
    let block_index = usize::from(thoughts > 0);
    let is_first = index == thoughts;
    if is_first && thoughts > 0 {
        let signature = json!({"type": "signature_delta", "signature": "sim"});
        events += &delta(0, &signature);
        events += &stop(0);
    }
    let piece = items::piece(generation, text, is_first);
    if let Some(call) = &request.output.call {
        if is_first {
            let id = items::id(generation, "toolu");
            let block = json!({"type": "tool_use", "id": id, "name": call.name, "input": {}});
            events += &start(block_index, &block);
        }
        let piece = json!({"type": "input_json_delta", "partial_json": piece});
        return events + &delta(block_index, &piece);
    }
    if is_first {
        events += &start(block_index, &json!({"type": "text", "text": ""}));
    }
    events + &delta(block_index, &json!({"type": "text_delta", "text": piece}))
}

/// The events after the last token.
pub(super) fn closing(generation: &Generation) -> Vec<String> {
    let index = usize::from(items::reasoning_tokens(generation) > 0);
    let mut events = Vec::new();
    if let Some(frame) = items::frame(generation) {
        let piece = match generation.request.output.call {
            Some(_) => json!({"type": "input_json_delta", "partial_json": frame.tail}),
            None => json!({"type": "text_delta", "text": frame.tail}),
        };
        events.push(delta(index, &piece));
    }
    let end = json!({
        "delta": {"stop_reason": stop_reason(generation)},
        "usage": usage(generation),
    });
    events.extend([
        stop(index),
        event("message_delta", end),
        event("message_stop", json!({})),
    ]);
    events
}

pub(super) fn failure(error: &ApiError) -> String {
    let error = json!({"type": "internal_error", "message": error.message()});
    event("error", json!({ "error": error }))
}

fn stop_reason(generation: &Generation) -> &'static str {
    match generation.request.output.call {
        Some(_) => "tool_use",
        None if generation.stops => "end_turn",
        None => "max_tokens",
    }
}

fn usage(generation: &Generation) -> Value {
    let cached = generation.reported_cached_tokens();
    let created = generation.created_cache_tokens().unwrap_or(0);
    let prompt = generation.request.prompt_tokens();
    json!({
        "input_tokens": prompt.saturating_sub(cached + created),
        "output_tokens": generation.completion_tokens(),
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
    })
}

fn start(index: usize, block: &Value) -> String {
    let fields = json!({"index": index, "content_block": block});
    event("content_block_start", fields)
}

fn delta(index: usize, delta: &Value) -> String {
    let fields = json!({"index": index, "delta": delta});
    event("content_block_delta", fields)
}

fn stop(index: usize) -> String {
    event("content_block_stop", json!({ "index": index }))
}

/// An event whose data begins with its type.
fn event(kind: &str, fields: Value) -> String {
    let mut data = json!({ "type": kind });
    if let (Some(data), Value::Object(fields)) = (data.as_object_mut(), fields) {
        data.extend(fields);
    }
    named_event(kind, &data)
}
