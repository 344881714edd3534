//! The output items of a Responses answer, and the events that tell of them while they grow. Pure.

use serde::Serialize;

use super::{number, sse};
use crate::sim::worker::answer::Transcript;
use crate::sim::worker::ask::output::Frame;
use crate::sim::worker::tokenizer;

// A field of type `()` is always null.

#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum Item {
    Message(Message),
    Reasoning(Reasoning),
    Call(Call),
}

#[derive(Serialize)]
pub(super) struct Message {
    id: String,
    content: Vec<Part>,
    role: &'static str,
    status: &'static str,
    #[serde(rename = "type")]
    kind: &'static str,
    phase: (),
}

#[derive(Serialize)]
pub(super) struct Reasoning {
    id: String,
    summary: [(); 0],
    #[serde(rename = "type")]
    kind: &'static str,
    content: Vec<Thought>,
    encrypted_content: (),
    status: Option<&'static str>,
}

#[derive(Serialize)]
pub(super) struct Call {
    arguments: String,
    call_id: String,
    name: String,
    #[serde(rename = "type")]
    kind: &'static str,
    id: String,
    status: &'static str,
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
struct Thought {
    text: String,
    #[serde(rename = "type")]
    kind: &'static str,
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
struct PartEvent<'a, P> {
    content_index: usize,
    item_id: String,
    output_index: usize,
    part: P,
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

#[derive(Serialize)]
struct ThoughtEvent<'a> {
    content_index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<&'a str>,
    item_id: String,
    output_index: usize,
    sequence_number: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    #[serde(rename = "type")]
    kind: &'a str,
}

#[derive(Serialize)]
struct ArgumentsEvent<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    arguments: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<&'a str>,
    item_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    output_index: usize,
    sequence_number: u64,
    #[serde(rename = "type")]
    kind: &'a str,
}

/// What the answer is made of so far, all of it as if it were done.
pub(super) fn done(transcript: &Transcript) -> Vec<Item> {
    let thought = transcript.ask.output.thinks.then(|| {
        let content = vec![thought(transcript)];
        reasoning(transcript, content)
    });
    thought.into_iter().chain([done_last(transcript)]).collect()
}

/// The events that open the first item.
pub(super) fn open_first(transcript: &mut Transcript) -> Vec<String> {
    match transcript.ask.output.thinks {
        true => open_reasoning(transcript),
        false => open_last(transcript),
    }
}

/// The events for a token that was just noted.
pub(super) fn token(transcript: &mut Transcript, text: &str) -> Vec<String> {
    let place = transcript.answers[0].len().saturating_sub(1);
    let thoughts = thinking_tokens(transcript);
    if place < thoughts {
        return vec![thought_event(
            transcript,
            "response.reasoning_text.delta",
            Some(text),
        )];
    }
    let is_first = place == thoughts;
    let mut events = Vec::new();
    if is_first && transcript.ask.output.thinks {
        events.extend(close_reasoning(transcript));
        events.extend(open_last(transcript));
    }
    let delta = match frame(transcript) {
        None => text.to_owned(),
        Some(frame) => {
            let head = if is_first { frame.head.as_str() } else { "" };
            format!("{head}{}", if frame.has_words { text } else { "" })
        }
    };
    events.push(delta_event(transcript, &delta));
    events
}

/// The events that close the last item.
pub(super) fn close_last(transcript: &mut Transcript) -> Vec<String> {
    let mut events = Vec::new();
    if let Some(tail) = frame(transcript).map(|frame| frame.tail.clone()) {
        events.push(delta_event(transcript, &tail));
    }
    match transcript.ask.output.call.clone() {
        None => events.extend(close_message(transcript)),
        Some(call) => events.push(arguments_done(transcript, &call.name)),
    }
    let item = done_last(transcript);
    events.push(item_event(
        transcript,
        "response.output_item.done",
        last_index(transcript),
        item,
    ));
    events
}

/// Tokens at the start of the answer that are thoughts.
pub(super) fn thinking_tokens(transcript: &Transcript) -> usize {
    match transcript.ask.output.thinks {
        true => transcript.ask.answer_tokens / 2,
        false => 0,
    }
}

fn last_index(transcript: &Transcript) -> usize {
    usize::from(transcript.ask.output.thinks)
}

/// Made from the response's own id, so that it needs no randomness of its own.
fn id(transcript: &Transcript, prefix: &str) -> String {
    let digest = xxhash_rust::xxh3::xxh3_64(transcript.ask.id.as_bytes());
    format!("{prefix}_{digest:016x}")
}

fn last_id(transcript: &Transcript) -> String {
    match transcript.ask.output.call {
        None => id(transcript, "msg"),
        Some(_) => id(transcript, "fc"),
    }
}

/// What the words of the last item stand in.
fn frame(transcript: &Transcript) -> Option<&Frame> {
    let output = &transcript.ask.output;
    let arguments = output.call.as_ref().map(|call| &call.arguments);
    arguments.or(output.format.as_ref())
}

/// The text of the last item: a message's, or a call's arguments.
fn said(transcript: &Transcript) -> String {
    let (_, words) = words(transcript);
    match frame(transcript) {
        Some(frame) => frame.around(&words),
        None => words,
    }
}

/// Words of thoughts, and of what follows them.
fn words(transcript: &Transcript) -> (String, String) {
    let tokens = &transcript.answers[0];
    let (thoughts, rest) = tokens.split_at(thinking_tokens(transcript).min(tokens.len()));
    (tokenizer::decode(thoughts), tokenizer::decode(rest))
}

fn open_reasoning(transcript: &mut Transcript) -> Vec<String> {
    let item = reasoning(transcript, Vec::new());
    let part = Thought {
        text: String::new(),
        ..thought(transcript)
    };
    vec![
        item_event(transcript, "response.output_item.added", 0, item),
        part_event(transcript, "response.content_part.added", "rs", 0, part),
    ]
}

fn close_reasoning(transcript: &mut Transcript) -> Vec<String> {
    let part = thought(transcript);
    let item = reasoning(transcript, vec![thought(transcript)]);
    vec![
        thought_event(transcript, "response.reasoning_text.done", None),
        part_event(transcript, "response.content_part.done", "rs", 0, part),
        item_event(transcript, "response.output_item.done", 0, item),
    ]
}

fn reasoning(transcript: &Transcript, content: Vec<Thought>) -> Item {
    Item::Reasoning(Reasoning {
        id: id(transcript, "rs"),
        summary: [],
        kind: "reasoning",
        status: content.is_empty().then_some("in_progress"),
        content,
        encrypted_content: (),
    })
}

fn thought(transcript: &Transcript) -> Thought {
    Thought {
        text: words(transcript).0,
        kind: "reasoning_text",
    }
}

/// A delta, or without one the whole text.
fn thought_event(transcript: &mut Transcript, kind: &str, delta: Option<&str>) -> String {
    let event = ThoughtEvent {
        content_index: 0,
        delta,
        item_id: id(transcript, "rs"),
        output_index: 0,
        sequence_number: number(transcript),
        text: match delta {
            Some(_) => None,
            None => Some(words(transcript).0),
        },
        kind,
    };
    sse(kind, &event)
}

fn open_last(transcript: &mut Transcript) -> Vec<String> {
    let index = last_index(transcript);
    let added = "response.output_item.added";
    let item = last(transcript, "in_progress", String::new(), Vec::new());
    let mut events = vec![item_event(transcript, added, index, item)];
    if transcript.ask.output.call.is_none() {
        let part = Part {
            text: String::new(),
            logprobs: Some([]),
            ..done_part(transcript)
        };
        let added = "response.content_part.added";
        events.push(part_event(transcript, added, "msg", index, part));
    }
    events
}

fn done_last(transcript: &Transcript) -> Item {
    last(
        transcript,
        "completed",
        said(transcript),
        vec![done_part(transcript)],
    )
}

fn last(
    transcript: &Transcript,
    status: &'static str,
    arguments: String,
    content: Vec<Part>,
) -> Item {
    match &transcript.ask.output.call {
        None => Item::Message(Message {
            id: id(transcript, "msg"),
            content,
            role: "assistant",
            status,
            kind: "message",
            phase: (),
        }),
        Some(call) => Item::Call(Call {
            arguments,
            call_id: id(transcript, "call"),
            name: call.name.clone(),
            kind: "function_call",
            id: id(transcript, "fc"),
            status,
        }),
    }
}

fn done_part(transcript: &Transcript) -> Part {
    Part {
        annotations: [],
        text: said(transcript),
        kind: "output_text",
        logprobs: None,
    }
}

fn delta_event(transcript: &mut Transcript, delta: &str) -> String {
    match transcript.ask.output.call {
        None => text_event(transcript, delta),
        Some(_) => arguments_event(transcript, delta),
    }
}

fn text_event(transcript: &mut Transcript, text: &str) -> String {
    let kind = "response.output_text.delta";
    let event = DeltaEvent {
        content_index: 0,
        delta: text,
        item_id: last_id(transcript),
        logprobs: [],
        output_index: last_index(transcript),
        sequence_number: number(transcript),
        kind,
    };
    sse(kind, &event)
}

fn close_message(transcript: &mut Transcript) -> Vec<String> {
    let index = last_index(transcript);
    let text_done = TextDoneEvent {
        content_index: 0,
        item_id: last_id(transcript),
        logprobs: [],
        output_index: index,
        sequence_number: number(transcript),
        text: said(transcript),
        kind: "response.output_text.done",
    };
    let part = done_part(transcript);
    vec![
        sse(text_done.kind, &text_done),
        part_event(transcript, "response.content_part.done", "msg", index, part),
    ]
}

fn arguments_event(transcript: &mut Transcript, delta: &str) -> String {
    let kind = "response.function_call_arguments.delta";
    let event = ArgumentsEvent {
        arguments: None,
        delta: Some(delta),
        item_id: last_id(transcript),
        name: None,
        output_index: last_index(transcript),
        sequence_number: number(transcript),
        kind,
    };
    sse(kind, &event)
}

fn arguments_done(transcript: &mut Transcript, name: &str) -> String {
    let kind = "response.function_call_arguments.done";
    let event = ArgumentsEvent {
        arguments: Some(said(transcript)),
        delta: None,
        item_id: last_id(transcript),
        name: Some(name),
        output_index: last_index(transcript),
        sequence_number: number(transcript),
        kind,
    };
    sse(kind, &event)
}

fn item_event(transcript: &mut Transcript, kind: &str, output_index: usize, item: Item) -> String {
    let event = ItemEvent {
        item,
        output_index,
        sequence_number: number(transcript),
        kind,
    };
    sse(kind, &event)
}

fn part_event(
    transcript: &mut Transcript,
    kind: &str,
    prefix: &str,
    output_index: usize,
    part: impl Serialize,
) -> String {
    let event = PartEvent {
        content_index: 0,
        item_id: id(transcript, prefix),
        output_index,
        part,
        sequence_number: number(transcript),
        kind,
    };
    sse(kind, &event)
}
