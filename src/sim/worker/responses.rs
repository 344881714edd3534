//! The shapes of the Responses API: the response object and the events of its stream. Pure.

mod items;

use serde::Serialize;
use serde_json::Value;

use self::items::Item;
use super::answer::{Transcript, json};
use super::transfer::Handed;

// A field of type `()` is always null.

#[derive(Serialize)]
struct Response<'a> {
    id: &'a str,
    created_at: u64,
    incomplete_details: Option<IncompleteDetails>,
    instructions: Option<&'a str>,
    metadata: Option<&'a Value>,
    model: &'a str,
    object: &'a str,
    output: Vec<Item>,
    parallel_tool_calls: bool,
    temperature: f64,
    tool_choice: &'a str,
    tools: [(); 0],
    top_p: f64,
    background: bool,
    max_output_tokens: usize,
    max_tool_calls: (),
    previous_response_id: (),
    prompt: (),
    reasoning: (),
    service_tier: &'a str,
    status: &'a str,
    text: (),
    top_logprobs: (),
    truncation: &'a str,
    usage: Option<Usage>,
    user: Option<&'a str>,
    presence_penalty: f64,
    frequency_penalty: f64,
    kv_transfer_params: Option<&'a Handed>,
    ec_transfer_params: (),
    input_messages: (),
    output_messages: (),
}

#[derive(Serialize)]
struct IncompleteDetails {
    reason: &'static str,
}

#[derive(Serialize)]
struct Usage {
    input_tokens: usize,
    input_tokens_details: InputTokensDetails,
    output_tokens: usize,
    output_tokens_details: OutputTokensDetails,
    total_tokens: usize,
}

#[derive(Serialize)]
struct InputTokensDetails {
    cached_tokens: usize,
    cache_write_tokens: usize,
    input_tokens_per_turn: [(); 0],
    cached_tokens_per_turn: [(); 0],
}

#[derive(Serialize)]
struct OutputTokensDetails {
    reasoning_tokens: usize,
    tool_output_tokens: usize,
    output_tokens_per_turn: [(); 0],
    tool_output_tokens_per_turn: [(); 0],
}

#[derive(Serialize)]
struct ResponseEvent<'a> {
    response: Response<'a>,
    sequence_number: u64,
    #[serde(rename = "type")]
    kind: &'a str,
}

pub(super) fn whole(transcript: &Transcript) -> String {
    json(&done_response(transcript))
}

pub(super) fn opening(transcript: &mut Transcript) -> Vec<String> {
    let mut events = Vec::with_capacity(2);
    for kind in ["response.created", "response.in_progress"] {
        let sequence_number = number(transcript);
        let event = ResponseEvent {
            response: open_response(transcript),
            sequence_number,
            kind,
        };
        events.push(sse(kind, &event));
    }
    events
}

/// The first item is opened with its first token, which comes after a transfer from another engine.
pub(super) fn token(transcript: &mut Transcript, text: &str) -> String {
    let mut events = match transcript.completion_tokens() {
        1 => items::open_first(transcript),
        _ => Vec::new(),
    };
    events.extend(items::token(transcript, text));
    events.concat()
}

/// The last event is always `response.completed`, even if the response in it is incomplete.
pub(super) fn closing(transcript: &mut Transcript) -> Vec<String> {
    let mut events = items::close_last(transcript);
    let sequence_number = number(transcript);
    let completed = ResponseEvent {
        response: done_response(transcript),
        sequence_number,
        kind: "response.completed",
    };
    events.push(sse(completed.kind, &completed));
    events
}

fn number(transcript: &mut Transcript) -> u64 {
    let number = transcript.next_number;
    transcript.next_number += 1;
    number
}

fn sse(kind: &str, data: &impl Serialize) -> String {
    format!("event: {kind}\ndata: {}\n\n", json(data))
}

fn open_response(transcript: &Transcript) -> Response<'_> {
    let ask = &transcript.ask;
    let repeated = &ask.repeated;
    Response {
        id: &ask.id,
        created_at: ask.created,
        incomplete_details: None,
        instructions: repeated.instructions.as_deref(),
        metadata: repeated.metadata.as_ref(),
        model: &ask.model,
        object: "response",
        output: Vec::new(),
        parallel_tool_calls: true,
        temperature: repeated.temperature.unwrap_or(1.0),
        tool_choice: "none",
        tools: [],
        top_p: repeated.top_p.unwrap_or(1.0),
        background: false,
        max_output_tokens: ask.answer_tokens,
        max_tool_calls: (),
        previous_response_id: (),
        prompt: (),
        reasoning: (),
        service_tier: "auto",
        status: "in_progress",
        text: (),
        top_logprobs: (),
        truncation: "disabled",
        usage: None,
        user: repeated.user.as_deref(),
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        kv_transfer_params: None,
        ec_transfer_params: (),
        input_messages: (),
        output_messages: (),
    }
}

fn done_response(transcript: &Transcript) -> Response<'_> {
    let input_tokens = transcript.ask.prompt_tokens();
    let output_tokens = transcript.completion_tokens();
    let usage = Usage {
        input_tokens,
        input_tokens_details: InputTokensDetails {
            cached_tokens: transcript.told_cached_tokens(),
            cache_write_tokens: 0,
            input_tokens_per_turn: [],
            cached_tokens_per_turn: [],
        },
        output_tokens,
        output_tokens_details: OutputTokensDetails {
            reasoning_tokens: items::thinking_tokens(transcript),
            tool_output_tokens: 0,
            output_tokens_per_turn: [],
            tool_output_tokens_per_turn: [],
        },
        total_tokens: input_tokens + output_tokens,
    };
    let (status, incomplete_details) = match transcript.ask.output.ends_itself || transcript.stops {
        true => ("completed", None),
        false => {
            let reason = "max_output_tokens";
            ("incomplete", Some(IncompleteDetails { reason }))
        }
    };
    Response {
        incomplete_details,
        output: items::done(transcript),
        status,
        usage: Some(usage),
        kv_transfer_params: transcript.handed.as_ref(),
        ..open_response(transcript)
    }
}
