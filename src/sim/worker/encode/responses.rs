//! The response object of the Responses API and the events of its stream, with the fields and the field order of
//! vLLM 0.32.

use serde_json::{Value, json};

use super::items::{self, event};
use crate::sim::worker::generation::Generation;

/// The response object after the last token.
pub(super) fn finished(generation: &Generation) -> Value {
    let input_tokens = generation.request.prompt_tokens();
    let output_tokens = generation.completion_tokens();
    let mut response = unfinished(generation);
    response["output"] = items::finished(generation).into();
    if generation.request.output.has_no_token_limit || generation.stops {
        response["status"] = "completed".into();
    } else {
        response["status"] = "incomplete".into();
        response["incomplete_details"] = json!({"reason": "max_output_tokens"});
    }
    response["usage"] = json!({
        "input_tokens": input_tokens,
        "input_tokens_details": {
            "cached_tokens": generation.reported_cached_tokens(),
            "cache_write_tokens": 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": output_tokens,
        "output_tokens_details": {
            "reasoning_tokens": items::reasoning_tokens(generation),
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": input_tokens + output_tokens,
    });
    response["kv_transfer_params"] = json!(generation.transfer_params);
    response
}

/// The events before the first token.
pub(super) fn opening(generation: &mut Generation) -> Vec<String> {
    let response = unfinished(generation);
    ["response.created", "response.in_progress"]
        .map(|kind| response_event(generation, kind, response.clone()))
        .into()
}

/// The events for a generated token. The first token also opens the first item, so that no item is announced while
/// a KV transfer is still under way and may fail.
pub(super) fn token(generation: &mut Generation, text: &str) -> String {
    let mut events = match generation.completion_tokens() {
        1 => items::open_first(generation),
        _ => Vec::new(),
    };
    events.extend(items::token(generation, text));
    events.concat()
}

/// The events after the last token. As in vLLM, the last event is always `response.completed`, even if the status of
/// its response is `incomplete`.
pub(super) fn closing(generation: &mut Generation) -> Vec<String> {
    let mut events = items::close_last(generation);
    let response = finished(generation);
    events.push(response_event(generation, "response.completed", response));
    events
}

fn response_event(generation: &mut Generation, kind: &str, response: Value) -> String {
    event(generation, kind, json!({"response": response}))
}

/// The response object before the last token: in progress, without output.
fn unfinished(generation: &Generation) -> Value {
    let request = &generation.request;
    let echoed = &request.echoed;
    json!({
        "id": request.id,
        "created_at": request.created,
        "incomplete_details": null,
        "instructions": echoed.instructions,
        "metadata": echoed.metadata,
        "model": request.model,
        "object": "response",
        "output": [],
        "parallel_tool_calls": true,
        "temperature": echoed.temperature.unwrap_or(1.0),
        "tool_choice": "none",
        "tools": [],
        "top_p": echoed.top_p.unwrap_or(1.0),
        "background": false,
        "max_output_tokens": request.answer_tokens,
        "max_tool_calls": null,
        "previous_response_id": null,
        "prompt": null,
        "reasoning": null,
        "service_tier": "auto",
        "status": "in_progress",
        "text": null,
        "top_logprobs": null,
        "truncation": "disabled",
        "usage": null,
        "user": echoed.user,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "kv_transfer_params": null,
        "ec_transfer_params": null,
        "input_messages": null,
        "output_messages": null,
    })
}
