//! The shapes of the Responses API: the response object and the events of its stream. Pure.

use serde::Serialize;
use serde_json::Value;

use super::answer::Transcript;
use super::answer::json;

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
    kv_transfer_params: (),
    ec_transfer_params: (),
    input_messages: (),
    output_messages: (),
}

#[derive(Serialize)]
struct IncompleteDetails {
    reason: &'static str,
}

#[derive(Serialize)]
struct Item {
    id: String,
    content: Vec<Part>,
    role: &'static str,
    status: &'static str,
    #[serde(rename = "type")]
    kind: &'static str,
    phase: (),
}

#[derive(Serialize)]
struct Part {
    annotations: [(); 0],
    text: String,
    #[serde(rename = "type")]
    kind: &'static str,
    /// Empty while the part is open, null when it is done.
    logprobs: Option<[(); 0]>,
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

#[derive(Serialize)]
struct ItemEvent<'a> {
    item: Item,
    output_index: usize,
    sequence_number: u64,
    #[serde(rename = "type")]
    kind: &'a str,
}

#[derive(Serialize)]
struct PartEvent<'a> {
    content_index: usize,
    item_id: String,
    output_index: usize,
    part: Part,
    sequence_number: u64,
    #[serde(rename = "type")]
    kind: &'a str,
}

#[derive(Serialize)]
struct DeltaEvent<'a> {
    content_index: usize,
    delta: &'a str,
    item_id: String,
    logprobs: [(); 0],
    output_index: usize,
    sequence_number: u64,
    #[serde(rename = "type")]
    kind: &'a str,
}

#[derive(Serialize)]
struct TextDoneEvent<'a> {
    content_index: usize,
    item_id: String,
    logprobs: [(); 0],
    output_index: usize,
    sequence_number: u64,
    text: String,
    #[serde(rename = "type")]
    kind: &'a str,
}

pub(super) fn whole(transcript: &Transcript) -> String {
    json(&done_response(transcript))
}

pub(super) fn opening(transcript: &mut Transcript) -> Vec<String> {
    let mut events = Vec::with_capacity(4);
    for kind in ["response.created", "response.in_progress"] {
        let sequence_number = number(transcript);
        let event = ResponseEvent {
            response: open_response(transcript),
            sequence_number,
            kind,
        };
        events.push(sse(kind, &event));
    }
    let kind = "response.output_item.added";
    let event = ItemEvent {
        item: item(transcript, "in_progress", Vec::new()),
        output_index: 0,
        sequence_number: number(transcript),
        kind,
    };
    events.push(sse(kind, &event));
    events.push(part_event(
        transcript,
        "response.content_part.added",
        Part {
            text: String::new(),
            logprobs: Some([]),
            ..done_part(transcript)
        },
    ));
    events
}

pub(super) fn token(transcript: &mut Transcript, text: &str) -> String {
    let kind = "response.output_text.delta";
    let event = DeltaEvent {
        content_index: 0,
        delta: text,
        item_id: item_id(transcript),
        logprobs: [],
        output_index: 0,
        sequence_number: number(transcript),
        kind,
    };
    sse(kind, &event)
}

/// The last event is always `response.completed`, even if the response in it is incomplete.
pub(super) fn closing(transcript: &mut Transcript) -> Vec<String> {
    let text_done = TextDoneEvent {
        content_index: 0,
        item_id: item_id(transcript),
        logprobs: [],
        output_index: 0,
        sequence_number: number(transcript),
        text: transcript.text(0),
        kind: "response.output_text.done",
    };
    let part = done_part(transcript);
    let part_done = part_event(transcript, "response.content_part.done", part);
    let item_done = ItemEvent {
        item: done_item(transcript),
        output_index: 0,
        sequence_number: number(transcript),
        kind: "response.output_item.done",
    };
    let sequence_number = number(transcript);
    let completed = ResponseEvent {
        response: done_response(transcript),
        sequence_number,
        kind: "response.completed",
    };
    vec![
        sse(text_done.kind, &text_done),
        part_done,
        sse(item_done.kind, &item_done),
        sse(completed.kind, &completed),
    ]
}

fn number(transcript: &mut Transcript) -> u64 {
    let number = transcript.next_number;
    transcript.next_number += 1;
    number
}

fn sse(kind: &str, data: &impl Serialize) -> String {
    format!("event: {kind}\ndata: {}\n\n", json(data))
}

fn part_event(transcript: &mut Transcript, kind: &str, part: Part) -> String {
    let event = PartEvent {
        content_index: 0,
        item_id: item_id(transcript),
        output_index: 0,
        part,
        sequence_number: number(transcript),
        kind,
    };
    sse(kind, &event)
}

/// Made from the response's own id, so that it needs no randomness of its own.
fn item_id(transcript: &Transcript) -> String {
    let id = &transcript.ask.id;
    let digest = xxhash_rust::xxh3::xxh3_64(id.as_bytes());
    format!("msg_{digest:016x}")
}

fn item(transcript: &Transcript, status: &'static str, content: Vec<Part>) -> Item {
    Item {
        id: item_id(transcript),
        content,
        role: "assistant",
        status,
        kind: "message",
        phase: (),
    }
}

fn done_item(transcript: &Transcript) -> Item {
    item(transcript, "completed", vec![done_part(transcript)])
}

fn done_part(transcript: &Transcript) -> Part {
    Part {
        annotations: [],
        text: transcript.text(0),
        kind: "output_text",
        logprobs: None,
    }
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
        kv_transfer_params: (),
        ec_transfer_params: (),
        input_messages: (),
        output_messages: (),
    }
}

/// Answers only ever end at their limit, so they are never "completed".
fn done_response(transcript: &Transcript) -> Response<'_> {
    let input_tokens = transcript.ask.prompt_tokens();
    let output_tokens = transcript.completion_tokens();
    let usage = Usage {
        input_tokens,
        input_tokens_details: InputTokensDetails {
            cached_tokens: transcript.cached_tokens,
            cache_write_tokens: 0,
            input_tokens_per_turn: [],
            cached_tokens_per_turn: [],
        },
        output_tokens,
        output_tokens_details: OutputTokensDetails {
            reasoning_tokens: 0,
            tool_output_tokens: 0,
            output_tokens_per_turn: [],
            tool_output_tokens_per_turn: [],
        },
        total_tokens: input_tokens + output_tokens,
    };
    Response {
        incomplete_details: Some(IncompleteDetails {
            reason: "max_output_tokens",
        }),
        output: vec![done_item(transcript)],
        status: "incomplete",
        usage: Some(usage),
        ..open_response(transcript)
    }
}
