//! The keys of a body that are read, and the readers of their values.

use std::borrow::Cow;

use serde::Deserialize;

use crate::json_scan::JsonString;
use crate::prompt::types::{Api, Section};

#[derive(Clone, Copy)]
#[expect(
    clippy::enum_variant_names,
    reason = "variants are named like the fields of a body"
)]
pub(super) enum Key {
    Model,
    Stream,
    Echo,
    User,
    PromptCacheKey,
    SessionId,
    CacheSalt,
    Priority,
    ServiceTier,
    /// The most output tokens, under this name.
    MaxTokens(&'static str),
    Choices(&'static str),
    /// A field that becomes part of the prompt.
    Prompt(Section),
    Forbidden(&'static str),
    VllmXargs,
    StreamOptions,
    StreamInterval,
    /// Of a Messages request: it names the user.
    Metadata,
    /// Of tokens in, tokens out: what other APIs have beside the prompt, and the images whose places are in the tokens.
    SamplingParams,
    Features,
    /// Of a completion: its engine computes other tokens than those of its prompt.
    ChangesTokens,
    Other,
}

impl Key {
    pub(super) fn new(name: &str, api: Api) -> Self {
        match name {
            "model" => Key::Model,
            "stream" => Key::Stream,
            "echo" => Key::Echo,
            "user" => Key::User,
            "prompt_cache_key" => Key::PromptCacheKey,
            "session_id" => Key::SessionId,
            "cache_salt" => Key::CacheSalt,
            "priority" => Key::Priority,
            "service_tier" => Key::ServiceTier,
            // Those that engines read there: another one would say nothing of what is generated.
            "max_tokens" if api != Api::Responses => Key::MaxTokens("max_tokens"),
            "max_completion_tokens" if api == Api::Chat => Key::MaxTokens("max_completion_tokens"),
            "max_output_tokens" if api == Api::Responses => Key::MaxTokens("max_output_tokens"),
            "n" => Key::Choices("n"),
            "best_of" => Key::Choices("best_of"),
            "messages" | "prompt" | "input" | "query" => Key::Prompt(Section::Conversation),
            "tools" => Key::Prompt(Section::Tools),
            "functions" => Key::Prompt(Section::Functions),
            "documents" => Key::Prompt(Section::Documents),
            "token_ids" if api == Api::Generate => Key::Prompt(Section::Conversation),
            "sampling_params" if api == Api::Generate => Key::SamplingParams,
            "features" if api == Api::Generate => Key::Features,
            "truncate_prompt_tokens" | "prompt_embeds" | "suffix" if api == Api::Completions => {
                Key::ChangesTokens
            }
            "instructions" => Key::Prompt(Section::Instructions),
            "system" if api.is_messages() => Key::Prompt(Section::Instructions),
            "metadata" if api.is_messages() => Key::Metadata,
            "chat_template" => Key::Prompt(Section::Template),
            "chat_template_kwargs" => Key::Prompt(Section::TemplateKwargs),
            "kv_transfer_params" => Key::Forbidden("kv_transfer_params"),
            "ec_transfer_params" => Key::Forbidden("ec_transfer_params"),
            "request_id" if api == Api::Responses => Key::Forbidden("request_id"),
            // Of embeddings they are the input.
            "input_ids" if api.generates() => Key::Forbidden("input_ids"),
            _ if let Some(name) = engine_field(name, api) => Key::Forbidden(name),
            "vllm_xargs" => Key::VllmXargs,
            "stream_options" => Key::StreamOptions,
            "stream_interval" => Key::StreamInterval,
            _ => Key::Other,
        }
    }
}

/// Fields that engines read from bodies and that only a router may set: for disaggregated prefill and decode, ranks, ids,
/// names of caches that KV events do not report, and an adapter beside the model by which rights and workers are chosen.
const ENGINE_FIELDS: [&str; 9] = [
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "data_parallel_rank",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "rid",
    "extra_key",
    "lora_path",
];

/// Further fields that only a router may set, in bodies that no other part of the router looks into.
const ENGINE_FIELDS_OF_OTHERS: [&str; 3] = ["request_id", "mm_payload", "return_mm_kwargs"];

fn engine_field(name: &str, api: Api) -> Option<&'static str> {
    let is_other = api.is_messages() || matches!(api, Api::Other | Api::Generate);
    let others = if is_other {
        &ENGINE_FIELDS_OF_OTHERS[..]
    } else {
        &[]
    };
    let mut fields = ENGINE_FIELDS.iter().chain(others);
    fields.find(|field| **field == name).copied()
}

/// The text of a value that is a string.
pub(super) fn string(json: &str) -> serde_json::Result<Option<Cow<'_, str>>> {
    if !json.starts_with('"') {
        return Ok(None);
    }
    serde_json::from_str(json).map(|JsonString(text)| Some(text))
}

/// The user that the metadata of a Messages request names.
pub(super) fn user_of(metadata: &str) -> Option<Cow<'_, str>> {
    #[derive(Deserialize)]
    struct Metadata<'a> {
        #[serde(borrow)]
        user_id: Option<Cow<'a, str>>,
    }
    let metadata: Metadata<'_> = serde_json::from_str(metadata).ok()?;
    metadata.user_id
}
