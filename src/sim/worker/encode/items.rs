//! The output items of a Responses answer, and the events of its stream that report them. Pure.
//!
//! An answer has one item, a message or a function call; with reasoning it has a reasoning item before that. "The last
//! item" is the message or the function call.

use serde_json::{Value, json};

use crate::sim::worker::generation::Generation;
use crate::sim::worker::json::named_event;
use crate::sim::worker::request::output::JsonFrame;
use crate::sim::worker::tokenizer;

/// An event of a Responses stream with its type and sequence number. vLLM sorts the fields by name.
pub(super) fn event(generation: &mut Generation, kind: &str, mut fields: Value) -> String {
    fields["sequence_number"] = generation.next_sequence_number().into();
    fields["type"] = kind.into();
    if let Some(fields) = fields.as_object_mut() {
        fields.sort_keys();
    }
    named_event(kind, &fields)
}

/// All items of the complete answer.
pub(super) fn finished(generation: &Generation) -> Vec<Value> {
    let has_reasoning = generation.request.output.has_reasoning;
    let reasoning =
        has_reasoning.then(|| reasoning_item(generation, &[reasoning_part(generation)]));
    let last = finished_last_item(generation);
    reasoning.into_iter().chain([last]).collect()
}

/// The events that open the first item.
pub(super) fn open_first(generation: &mut Generation) -> Vec<String> {
    if generation.request.output.has_reasoning {
        open_reasoning(generation)
    } else {
        open_last(generation)
    }
}

/// The events for the token that was added last.
pub(super) fn token(generation: &mut Generation, text: &str) -> Vec<String> {
    let index = generation.answers[0].len().saturating_sub(1);
    let reasoning_tokens = reasoning_tokens(generation);
    if index < reasoning_tokens {
        let kind = "response.reasoning_text.delta";
        return vec![reasoning_event(generation, kind, json!({"delta": text}))];
    }
    let is_first = index == reasoning_tokens;
    let mut events = Vec::new();
    if is_first && generation.request.output.has_reasoning {
        events.extend(close_reasoning(generation));
        events.extend(open_last(generation));
    }
    let delta = piece(generation, text, is_first);
    events.push(delta_event(generation, &delta));
    events
}

/// The events that close the last item.
pub(super) fn close_last(generation: &mut Generation) -> Vec<String> {
    let mut events = Vec::new();
    if let Some(tail) = frame(generation).map(|frame| frame.tail.clone()) {
        events.push(delta_event(generation, &tail));
    }
    let (text, index) = (last_text(generation, 0), last_index(generation));
    match generation.request.output.call.clone() {
        None => {
            let fields = json!({"content_index": 0, "logprobs": [], "text": text});
            events.push(last_event(generation, "response.output_text.done", fields));
            let part = text_part(&text, Value::Null);
            let kind = "response.content_part.done";
            events.push(part_event(generation, kind, "msg", index, part));
        }
        Some(call) => {
            let fields = json!({"arguments": text, "name": call.name});
            let kind = "response.function_call_arguments.done";
            events.push(last_event(generation, kind, fields));
        }
    }
    let item = finished_last_item(generation);
    let kind = "response.output_item.done";
    events.push(item_event(generation, kind, index, item));
    events
}

/// How many of the answer's first tokens are reasoning.
pub(super) fn reasoning_tokens(generation: &Generation) -> usize {
    if generation.request.output.has_reasoning {
        generation.request.answer_tokens / 2
    } else {
        0
    }
}

fn last_index(generation: &Generation) -> usize {
    usize::from(generation.request.output.has_reasoning)
}

/// An item id, derived from the response's id.
pub(super) fn id(generation: &Generation, prefix: &str) -> String {
    let digest = xxhash_rust::xxh3::xxh3_64(generation.request.id.as_bytes());
    format!("{prefix}_{digest:016x}")
}

/// The JSON around the generated words of the last item, if it has to be JSON.
pub(super) fn frame(generation: &Generation) -> Option<&JsonFrame> {
    let output = &generation.request.output;
    let arguments = output.call.as_ref().map(|call| &call.arguments);
    arguments.or(output.format.as_ref())
}

/// What a token adds to the text of the last item: its word, and before the first the start of the JSON.
pub(super) fn piece(generation: &Generation, text: &str, is_first: bool) -> String {
    let Some(frame) = frame(generation) else {
        return text.to_owned();
    };
    let head = if is_first { frame.head.as_str() } else { "" };
    format!("{head}{}", if frame.has_words { text } else { "" })
}

/// The text of the last item: of the message, or the arguments of the call.
pub(super) fn last_text(generation: &Generation, index: usize) -> String {
    let (_, words) = words(generation, index);
    match frame(generation) {
        Some(frame) => frame.around(&words),
        None => words,
    }
}

/// The generated words of the reasoning, and those of the last item.
pub(super) fn words(generation: &Generation, index: usize) -> (String, String) {
    let tokens = &generation.answers[index];
    let (reasoning, rest) = tokens.split_at(reasoning_tokens(generation).min(tokens.len()));
    (tokenizer::decode(reasoning), tokenizer::decode(rest))
}

fn open_reasoning(generation: &mut Generation) -> Vec<String> {
    let item = reasoning_item(generation, &[]);
    let part = json!({"text": "", "type": "reasoning_text"});
    vec![
        item_event(generation, "response.output_item.added", 0, item),
        part_event(generation, "response.content_part.added", "rs", 0, part),
    ]
}

fn close_reasoning(generation: &mut Generation) -> Vec<String> {
    let part = reasoning_part(generation);
    let item = reasoning_item(generation, std::slice::from_ref(&part));
    let text = json!({"text": part["text"]});
    vec![
        reasoning_event(generation, "response.reasoning_text.done", text),
        part_event(generation, "response.content_part.done", "rs", 0, part),
        item_event(generation, "response.output_item.done", 0, item),
    ]
}

fn reasoning_item(generation: &Generation, content: &[Value]) -> Value {
    json!({
        "id": id(generation, "rs"),
        "summary": [],
        "type": "reasoning",
        "content": content,
        "encrypted_content": null,
        "status": content.is_empty().then_some("in_progress"),
    })
}

fn reasoning_part(generation: &Generation) -> Value {
    json!({"text": words(generation, 0).0, "type": "reasoning_text"})
}

fn open_last(generation: &mut Generation) -> Vec<String> {
    let index = last_index(generation);
    let item = last_item(generation, "in_progress", "", &[]);
    let kind = "response.output_item.added";
    let mut events = vec![item_event(generation, kind, index, item)];
    if generation.request.output.call.is_none() {
        let part = text_part("", json!([]));
        let kind = "response.content_part.added";
        events.push(part_event(generation, kind, "msg", index, part));
    }
    events
}

fn finished_last_item(generation: &Generation) -> Value {
    let text = last_text(generation, 0);
    let part = text_part(&text, Value::Null);
    last_item(generation, "completed", &text, &[part])
}

fn last_item(generation: &Generation, status: &str, arguments: &str, content: &[Value]) -> Value {
    match &generation.request.output.call {
        None => json!({
            "id": id(generation, "msg"),
            "content": content,
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": null,
        }),
        Some(call) => json!({
            "arguments": arguments,
            "call_id": id(generation, "call"),
            "name": call.name,
            "type": "function_call",
            "id": id(generation, "fc"),
            "status": status,
        }),
    }
}

fn text_part(text: &str, logprobs: Value) -> Value {
    json!({"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs})
}

fn delta_event(generation: &mut Generation, delta: &str) -> String {
    let (kind, fields) = match generation.request.output.call {
        None => (
            "response.output_text.delta",
            json!({"content_index": 0, "delta": delta, "logprobs": []}),
        ),
        Some(_) => (
            "response.function_call_arguments.delta",
            json!({"delta": delta}),
        ),
    };
    last_event(generation, kind, fields)
}

/// An event about the last item.
fn last_event(generation: &mut Generation, kind: &str, mut fields: Value) -> String {
    fields["item_id"] = match generation.request.output.call {
        None => id(generation, "msg").into(),
        Some(_) => id(generation, "fc").into(),
    };
    fields["output_index"] = last_index(generation).into();
    event(generation, kind, fields)
}

fn reasoning_event(generation: &mut Generation, kind: &str, mut fields: Value) -> String {
    fields["content_index"] = 0.into();
    fields["item_id"] = id(generation, "rs").into();
    fields["output_index"] = 0.into();
    event(generation, kind, fields)
}

fn item_event(generation: &mut Generation, kind: &str, index: usize, item: Value) -> String {
    event(
        generation,
        kind,
        json!({"item": item, "output_index": index}),
    )
}

fn part_event(
    generation: &mut Generation,
    kind: &str,
    prefix: &str,
    index: usize,
    part: Value,
) -> String {
    let item_id = id(generation, prefix);
    let fields =
        json!({"content_index": 0, "item_id": item_id, "output_index": index, "part": part});
    event(generation, kind, fields)
}
