//! The shapes of chat completions and completions. Pure.

use serde::Serialize;

use super::answer::{FINGERPRINT, Transcript, Usage, json};
use super::ask::{Api, UsageReport};
use super::transfer::Handed;

pub(super) const DONE: &str = "data: [DONE]\n\n";

// A field of type `()` is always null, and one of type `Option<()>` is null or left out.

#[derive(Serialize)]
struct WholeChat<'a> {
    id: &'a str,
    object: &'a str,
    created: u64,
    model: &'a str,
    choices: [WholeChatChoice; 1],
    service_tier: (),
    system_fingerprint: &'a str,
    usage: Usage,
    prompt_logprobs: (),
    prompt_token_ids: (),
    prompt_text: (),
    kv_transfer_params: Option<&'a Handed>,
    ec_transfer_params: (),
    metrics: (),
}

#[derive(Serialize)]
struct WholeChatChoice {
    index: usize,
    message: Message,
    logprobs: (),
    finish_reason: Option<&'static str>,
    stop_reason: (),
    token_ids: (),
    routed_experts: (),
}

#[derive(Serialize)]
struct Message {
    role: &'static str,
    content: String,
    refusal: (),
    annotations: (),
    audio: (),
    function_call: (),
    reasoning: (),
}

#[derive(Serialize)]
struct WholeCompletion<'a> {
    id: &'a str,
    object: &'a str,
    created: u64,
    model: &'a str,
    choices: Vec<WholeCompletionChoice>,
    service_tier: (),
    system_fingerprint: &'a str,
    usage: Usage,
    kv_transfer_params: Option<&'a Handed>,
    ec_transfer_params: (),
    metrics: (),
}

#[derive(Serialize)]
struct WholeCompletionChoice {
    index: usize,
    text: String,
    logprobs: (),
    finish_reason: Option<&'static str>,
    stop_reason: (),
    token_ids: (),
    prompt_logprobs: (),
    prompt_token_ids: (),
    routed_experts: (),
}

#[derive(Serialize)]
struct Chunk<'a, C> {
    id: &'a str,
    object: &'a str,
    created: u64,
    model: &'a str,
    choices: [C; 1],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    system_fingerprint: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<()>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_text: Option<()>,
}

#[derive(Serialize)]
struct ChatChoice<'a> {
    index: usize,
    delta: Delta<'a>,
    logprobs: (),
    finish_reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<()>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<()>,
}

#[derive(Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'a str>,
    content: &'a str,
}

#[derive(Serialize)]
struct CompletionChoice<'a> {
    index: usize,
    text: &'a str,
    logprobs: (),
    finish_reason: Option<&'a str>,
    stop_reason: (),
    prompt_token_ids: (),
    token_ids: (),
}

/// The event after the last token has no choices, which is an empty list and not null.
#[derive(Serialize)]
struct UsageChunk<'a> {
    id: &'a str,
    object: &'a str,
    created: u64,
    model: &'a str,
    choices: [(); 0],
    usage: Usage,
    system_fingerprint: &'a str,
}

pub(super) fn whole_chat(transcript: &Transcript) -> String {
    let ask = &transcript.ask;
    let message = Message {
        role: "assistant",
        content: transcript.text(0),
        refusal: (),
        annotations: (),
        audio: (),
        function_call: (),
        reasoning: (),
    };
    let choice = WholeChatChoice {
        index: 0,
        message,
        logprobs: (),
        finish_reason: transcript.finish_reason(0),
        stop_reason: (),
        token_ids: (),
        routed_experts: (),
    };
    json(&WholeChat {
        id: &ask.id,
        object: "chat.completion",
        created: ask.created,
        model: &ask.model,
        choices: [choice],
        service_tier: (),
        system_fingerprint: FINGERPRINT,
        usage: transcript.usage(),
        prompt_logprobs: (),
        prompt_token_ids: (),
        prompt_text: (),
        kv_transfer_params: transcript.handed.as_ref(),
        ec_transfer_params: (),
        metrics: (),
    })
}

pub(super) fn whole_completion(transcript: &Transcript) -> String {
    let ask = &transcript.ask;
    let choice = |index| WholeCompletionChoice {
        index,
        text: transcript.text(index),
        logprobs: (),
        finish_reason: transcript.finish_reason(index),
        stop_reason: (),
        token_ids: (),
        prompt_logprobs: (),
        prompt_token_ids: (),
        routed_experts: (),
    };
    json(&WholeCompletion {
        id: &ask.id,
        object: "text_completion",
        created: ask.created,
        model: &ask.model,
        choices: (0..transcript.answers.len()).map(choice).collect(),
        service_tier: (),
        system_fingerprint: FINGERPRINT,
        usage: transcript.usage(),
        kv_transfer_params: transcript.handed.as_ref(),
        ec_transfer_params: (),
        metrics: (),
    })
}

pub(super) fn opening_chat(transcript: &Transcript) -> String {
    let choice = ChatChoice {
        index: 0,
        delta: Delta {
            role: Some("assistant"),
            content: "",
        },
        logprobs: (),
        finish_reason: None,
        stop_reason: None,
        token_ids: None,
    };
    let mut chunk = chunk(transcript, choice);
    chunk.prompt_token_ids = Some(());
    chunk.prompt_text = Some(());
    event(&chunk)
}

pub(super) fn chat_token(transcript: &Transcript, index: usize, text: &str) -> String {
    let finish_reason = transcript.finish_reason(index);
    let choice = ChatChoice {
        index,
        delta: Delta {
            role: None,
            content: text,
        },
        logprobs: (),
        finish_reason,
        stop_reason: finish_reason.map(|_| ()),
        token_ids: Some(()),
    };
    let mut chunk = chunk(transcript, choice);
    let is_last_event = finish_reason.is_some() && transcript.ask.usage == UsageReport::Never;
    chunk.system_fingerprint = is_last_event.then_some(FINGERPRINT);
    event(&chunk)
}

pub(super) fn completion_token(transcript: &Transcript, index: usize, text: &str) -> String {
    let finish_reason = transcript.finish_reason(index);
    let choice = CompletionChoice {
        index,
        text,
        logprobs: (),
        finish_reason,
        stop_reason: (),
        prompt_token_ids: (),
        token_ids: (),
    };
    let mut chunk = chunk(transcript, choice);
    let is_last_event = transcript.ask.usage == UsageReport::Never
        && transcript.completion_tokens()
            == transcript.ask.answer_tokens * transcript.answers.len();
    chunk.system_fingerprint = is_last_event.then_some(FINGERPRINT);
    event(&chunk)
}

pub(super) fn closing(transcript: &Transcript) -> Vec<String> {
    let ask = &transcript.ask;
    let usage = UsageChunk {
        id: &ask.id,
        object: chunk_object(transcript),
        created: ask.created,
        model: &ask.model,
        choices: [],
        usage: transcript.final_usage(),
        system_fingerprint: FINGERPRINT,
    };
    match ask.usage {
        UsageReport::Never => vec![DONE.to_owned()],
        UsageReport::AtTheEnd | UsageReport::Always => vec![event(&usage), DONE.to_owned()],
    }
}

fn chunk<C>(transcript: &Transcript, choice: C) -> Chunk<'_, C> {
    let ask = &transcript.ask;
    let with_usage = ask.usage == UsageReport::Always;
    Chunk {
        id: &ask.id,
        object: chunk_object(transcript),
        created: ask.created,
        model: &ask.model,
        choices: [choice],
        usage: with_usage.then(|| transcript.running_usage()),
        system_fingerprint: None,
        prompt_token_ids: None,
        prompt_text: None,
    }
}

fn chunk_object(transcript: &Transcript) -> &'static str {
    match transcript.ask.api {
        Api::Chat => "chat.completion.chunk",
        Api::Completions | Api::Responses => "text_completion",
    }
}

fn event(data: &impl Serialize) -> String {
    format!("data: {}\n\n", json(data))
}
