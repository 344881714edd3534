//! The answers of chat completions and completions, with the fields and the field order of vLLM 0.32. Pure.

use serde_json::{Value, json};

use super::items;
use crate::sim::worker::generation::Generation;
use crate::sim::worker::json::{DONE, event};
use crate::sim::worker::request::output::Output;
use crate::sim::worker::request::{Api, UsageReport};
use crate::sim::worker::tokenizer;

const FINGERPRINT: &str = "vllm-0.32.0-sim";

pub(super) fn whole_chat(generation: &Generation) -> Value {
    let request = &generation.request;
    let choice = |index| {
        json!({
            "index": index,
            "message": chat_message(generation, index),
            "logprobs": chat_logprobs(generation, &generation.answers[index]),
            "finish_reason": chat_finish_reason(generation, index),
            "stop_reason": null,
            "token_ids": null,
            "routed_experts": null,
        })
    };
    json!({
        "id": request.id,
        "object": "chat.completion",
        "created": request.created,
        "model": request.model,
        "choices": (0..generation.answers.len()).map(choice).collect::<Vec<_>>(),
        "service_tier": null,
        "system_fingerprint": FINGERPRINT,
        "usage": whole_usage(generation),
        "prompt_logprobs": null,
        "prompt_token_ids": null,
        "prompt_text": null,
        "kv_transfer_params": generation.transfer_params,
        "ec_transfer_params": null,
        "metrics": null,
    })
}

fn chat_message(generation: &Generation, index: usize) -> Value {
    let output = &generation.request.output;
    let text = items::last_text(generation, index);
    let reasoning = output
        .has_reasoning
        .then(|| items::words(generation, index).0);
    let mut message = json!({
        "role": "assistant",
        "content": text,
        "refusal": null,
        "annotations": null,
        "audio": null,
        "function_call": null,
        "reasoning": reasoning,
    });
    if let Some(call) = &output.call {
        message["content"] = Value::Null;
        message["tool_calls"] = json!([{
            "id": call_id(generation, index),
            "type": "function",
            "function": {"name": call.name, "arguments": text},
        }]);
    }
    message
}

fn call_id(generation: &Generation, index: usize) -> String {
    match index {
        0 => items::id(generation, "call"),
        _ => items::id(generation, &format!("call{index}")),
    }
}

/// What a generated token's probability is said to be.
const LOGPROB: f64 = -0.25;

/// The probabilities of tokens in the form of chats; null unless the request asks for them.
fn chat_logprobs(generation: &Generation, tokens: &[u32]) -> Value {
    let Some(top) = generation.request.logprobs else {
        return Value::Null;
    };
    let one = |token: &u32| {
        let text = tokenizer::decode(&[*token]);
        json!({"token": text, "logprob": LOGPROB, "bytes": text.as_bytes()})
    };
    let content = tokens.iter().map(|token| {
        let mut entry = one(token);
        entry["top_logprobs"] = (0..top as u32)
            .map(|other| one(&token.wrapping_add(other)))
            .collect();
        entry
    });
    json!({"content": content.collect::<Vec<_>>()})
}

/// The probabilities of an answer's tokens from `from` on, in the form of completions; null unless the request asks for them.
fn logprobs(generation: &Generation, index: usize, from: usize) -> Value {
    let Some(top) = generation.request.logprobs else {
        return Value::Null;
    };
    let (before, tokens) = generation.answers[index].split_at(from);
    let offset = tokenizer::decode(before).len();
    let texts: Vec<String> = tokens
        .iter()
        .map(|token| tokenizer::decode(&[*token]))
        .collect();
    let offsets = texts.iter().scan(offset, |end, text| {
        let start = *end;
        *end += text.len();
        Some(start)
    });
    let others = tokens.iter().map(|token| -> Value {
        let others = (0..top as u32).map(|other| tokenizer::decode(&[token.wrapping_add(other)]));
        others
            .map(|text| (text, LOGPROB.into()))
            .collect::<serde_json::Map<_, _>>()
            .into()
    });
    json!({
        "text_offset": offsets.collect::<Vec<_>>(),
        "token_logprobs": vec![LOGPROB; tokens.len()],
        "tokens": texts,
        "top_logprobs": others.collect::<Vec<_>>(),
    })
}

pub(super) fn whole_completion(generation: &Generation) -> Value {
    let request = &generation.request;
    let choice = |index| {
        json!({
            "index": index,
            "text": generation.text(index),
            "logprobs": logprobs(generation, index, 0),
            "finish_reason": generation.finish_reason(index),
            "stop_reason": null,
            "token_ids": request.returns_token_ids.then(|| &generation.answers[index]),
            "prompt_logprobs": null,
            "prompt_token_ids": prompt_token_ids(generation, index),
            "routed_experts": null,
        })
    };
    json!({
        "id": request.id,
        "object": "text_completion",
        "created": request.created,
        "model": request.model,
        "choices": (0..generation.answers.len()).map(choice).collect::<Vec<_>>(),
        "service_tier": null,
        "system_fingerprint": FINGERPRINT,
        "usage": whole_usage(generation),
        "kv_transfer_params": generation.transfer_params,
        "ec_transfer_params": null,
        "metrics": null,
    })
}

/// The first chunk of each answer of a chat, which has the role and no text.
pub(super) fn role_chunks(generation: &Generation) -> Vec<String> {
    let role_chunk = |index: usize| {
        let choice = json!({
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": null,
            "finish_reason": null,
        });
        let mut chunk = chunk(generation, &choice);
        chunk["prompt_token_ids"] = prompt_token_ids(generation, 0);
        chunk["prompt_text"] = Value::Null;
        event(&chunk)
    };
    (0..generation.answers.len()).map(role_chunk).collect()
}

pub(super) fn chat_chunk(generation: &Generation, index: usize, text: &str) -> String {
    let is_last = generation.finish_reason(index).is_some();
    let finish_reason = is_last.then(|| chat_finish_reason(generation, index));
    let mut choice = json!({
        "index": index,
        "delta": chat_delta(generation, index, (text, is_last)),
        "logprobs": chat_logprobs(generation, last_token(generation, index)),
        "finish_reason": finish_reason,
    });
    if finish_reason.is_some() {
        choice["stop_reason"] = Value::Null;
    }
    choice["token_ids"] = last_token_id(generation, index);
    token_chunk(generation, &choice)
}

pub(super) fn completion_chunk(generation: &Generation, index: usize, text: &str) -> String {
    let is_first = generation.answers[index].len() == 1;
    let prompt_token_ids = if is_first {
        prompt_token_ids(generation, index)
    } else {
        Value::Null
    };
    let last = generation.answers[index].len().saturating_sub(1);
    let choice = json!({
        "index": index,
        "text": text,
        "logprobs": logprobs(generation, index, last),
        "finish_reason": generation.finish_reason(index),
        "stop_reason": null,
        "prompt_token_ids": prompt_token_ids,
        "token_ids": last_token_id(generation, index),
    });
    token_chunk(generation, &choice)
}

/// The token that was added last.
fn last_token(generation: &Generation, index: usize) -> &[u32] {
    let tokens = &generation.answers[index];
    &tokens[tokens.len().saturating_sub(1)..]
}

/// Null unless the request asks for ids.
fn prompt_token_ids(generation: &Generation, index: usize) -> Value {
    let request = &generation.request;
    let ids = request.prompts.get(index);
    ids.filter(|_| request.returns_token_ids)
        .map_or(Value::Null, |ids| json!(ids))
}

/// The id of the token that was added last, in a list.
fn last_token_id(generation: &Generation, index: usize) -> Value {
    match generation.answers[index].last() {
        Some(id) if generation.request.returns_token_ids => json!([id]),
        _ => Value::Null,
    }
}

fn chat_finish_reason(generation: &Generation, index: usize) -> &'static str {
    let output = &generation.request.output;
    match generation.finish_reason(index) {
        Some("length") if !output.has_no_token_limit || *output == Output::default() => "length",
        _ if output.call.is_some() => "tool_calls",
        _ => "stop",
    }
}

/// What the token that was added last is a part of.
fn chat_delta(generation: &Generation, index: usize, (text, is_last): (&str, bool)) -> Value {
    let output = &generation.request.output;
    let token = generation.answers[index].len().saturating_sub(1);
    let reasoning_tokens = items::reasoning_tokens(generation);
    if token < reasoning_tokens {
        return json!({"reasoning": text});
    }
    let is_first = token == reasoning_tokens;
    let mut text = items::piece(generation, text, is_first);
    if let Some(frame) = items::frame(generation).filter(|_| is_last) {
        text += &frame.tail;
    }
    let Some(call) = &output.call else {
        return json!({"content": text});
    };
    let mut fragment = json!({"index": 0, "function": {"arguments": text}});
    if is_first {
        fragment["id"] = call_id(generation, index).into();
        fragment["type"] = "function".into();
        fragment["function"]["name"] = call.name.as_str().into();
    }
    json!({"tool_calls": [fragment]})
}

/// The events after the last token: usage, if the request asked for it, and the end marker.
pub(super) fn closing(generation: &Generation) -> Vec<String> {
    if generation.request.usage == UsageReport::Never {
        return vec![DONE.to_owned()];
    }
    let request = &generation.request;
    let usage = json!({
        "id": request.id,
        "object": chunk_object(generation),
        "created": request.created,
        "model": request.model,
        "choices": [],
        "usage": final_usage(generation),
        "system_fingerprint": FINGERPRINT,
    });
    vec![event(&usage), DONE.to_owned()]
}

/// A chunk with one token. Without a usage event after it, the last one has the fingerprint.
fn token_chunk(generation: &Generation, choice: &Value) -> String {
    let mut chunk = chunk(generation, choice);
    let request = &generation.request;
    let tokens = request.answer_tokens * generation.answers.len();
    if request.usage == UsageReport::Never && generation.completion_tokens() == tokens {
        chunk["system_fingerprint"] = FINGERPRINT.into();
    }
    event(&chunk)
}

fn chunk(generation: &Generation, choice: &Value) -> Value {
    let request = &generation.request;
    let mut chunk = json!({
        "id": request.id,
        "object": chunk_object(generation),
        "created": request.created,
        "model": request.model,
        "choices": [choice],
    });
    if request.usage == UsageReport::Always {
        chunk["usage"] = token_counts(generation);
        chunk["usage"]["completion_tokens_details"] = Value::Null;
    }
    chunk
}

fn chunk_object(generation: &Generation) -> &'static str {
    match generation.request.api {
        Api::Chat => "chat.completion.chunk",
        Api::Completions | Api::Responses | Api::Messages => "text_completion",
    }
}

/// The usage of an answer that is not streamed.
fn whole_usage(generation: &Generation) -> Value {
    let mut usage = token_counts(generation);
    usage["prompt_tokens_details"] = json!({
        "cached_tokens": generation.reported_cached_tokens(),
        "created_cache_tokens": generation.created_cache_tokens(),
        "multimodal_tokens": null,
    });
    usage["completion_tokens_details"] = Value::Null;
    usage
}

/// The usage in the last event of a stream, which leaves out what is null.
fn final_usage(generation: &Generation) -> Value {
    let mut usage = token_counts(generation);
    usage["prompt_tokens_details"] = json!({"cached_tokens": generation.reported_cached_tokens()});
    let reasoning = items::reasoning_tokens(generation);
    if reasoning > 0 {
        usage["completion_tokens_details"] = json!({"reasoning_tokens": reasoning});
    }
    if let Some(created) = generation.created_cache_tokens() {
        usage["prompt_tokens_details"]["created_cache_tokens"] = created.into();
    }
    usage
}

fn token_counts(generation: &Generation) -> Value {
    let prompt_tokens = generation.request.prompt_tokens();
    let completion_tokens = generation.completion_tokens();
    json!({
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    })
}
