//! One chunk of a chat stream, as slices of its text. What engines leave out or set to null is `None`.

use std::borrow::Cow;

use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use smallvec::SmallVec;

use crate::responses::item::joined_text;
use crate::responses::members::{self, Members};

#[derive(Deserialize)]
pub(super) struct Chunk<'a> {
    /// Nearly always one, or none.
    #[serde(borrow)]
    pub(super) choices: Option<SmallVec<[Choice<'a>; 1]>>,
    #[serde(borrow)]
    pub(super) usage: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
pub(super) struct Choice<'a> {
    pub(super) index: Option<u64>,
    #[serde(borrow)]
    pub(super) delta: Option<Delta<'a>>,
    #[serde(borrow)]
    pub(super) logprobs: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) finish_reason: Option<Cow<'a, str>>,
}

/// A server that writes empty objects as `[]` has none of them.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Delta<'a> {
    #[serde(borrow)]
    pub(super) content: Option<&'a RawValue>,
    /// vLLM's name.
    #[serde(borrow)]
    pub(super) reasoning: Option<&'a RawValue>,
    /// The name of SGLang and others.
    #[serde(borrow)]
    pub(super) reasoning_content: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) refusal: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) tool_calls: Option<Vec<CallDelta<'a>>>,
    /// The older form of a single call.
    #[serde(borrow)]
    pub(super) function_call: Option<FunctionDelta<'a>>,
}

#[derive(Deserialize)]
pub(super) struct CallDelta<'a> {
    #[serde(default, deserialize_with = "call_index")]
    pub(super) index: Option<u64>,
    #[serde(borrow)]
    pub(super) id: Option<Cow<'a, str>>,
    #[serde(borrow)]
    pub(super) function: Option<FunctionDelta<'a>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct FunctionDelta<'a> {
    #[serde(borrow)]
    pub(super) name: Option<Cow<'a, str>>,
    /// A string; an object from some engines.
    #[serde(borrow)]
    pub(super) arguments: Option<&'a RawValue>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ChatUsage {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: Option<u64>,
    prompt_tokens_details: Option<PromptDetails>,
    completion_tokens_details: Option<CompletionDetails>,
    /// SGLang's place for it.
    reasoning_tokens: Option<u64>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct PromptDetails {
    cached_tokens: Option<u64>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct CompletionDetails {
    reasoning_tokens: Option<u64>,
}

/// Some engines give every call, or a call of a tool that they do not know, the index -1: that is none.
fn call_index<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let index = Option::<i64>::deserialize(deserializer)?;
    Ok(index.and_then(|index| u64::try_from(index).ok()))
}

/// The usage of a chat completion as that of a response; `None` if it cannot be read.
pub(super) fn usage(raw: &str) -> Option<String> {
    let usage: ChatUsage = serde_json::from_str(raw).ok()?;
    let (input, output) = (usage.prompt_tokens, usage.completion_tokens);
    let total = usage.total_tokens.unwrap_or(input.saturating_add(output));
    let cached = usage
        .prompt_tokens_details
        .and_then(|details| details.cached_tokens);
    let reasoning = usage
        .completion_tokens_details
        .and_then(|details| details.reasoning_tokens)
        .or(usage.reasoning_tokens);
    Some(format!(
        r#"{{"input_tokens":{input},"input_tokens_details":{{"cached_tokens":{},"cache_write_tokens":0}},"output_tokens":{output},"output_tokens_details":{{"reasoning_tokens":{}}},"total_tokens":{total}}}"#,
        cached.unwrap_or(0),
        reasoning.unwrap_or(0),
    ))
}

/// The characters of a text, as a JSON string without quotes; `None` for none.
pub(super) fn text_of(raw: Option<&RawValue>) -> Option<Cow<'_, str>> {
    let text = joined_text(raw?.get(), "")?;
    (!text.is_empty()).then_some(text)
}

/// The entries of `logprobs.content`: a list without its brackets.
pub(super) fn entries(logprobs: &str) -> Option<&str> {
    let logprobs = Members::parse(logprobs).ok()?;
    let list = logprobs.get("content")?.trim();
    list.strip_prefix('[')?.strip_suffix(']')
}

pub(super) fn message_of(error: &str) -> String {
    let message = match Members::parse(error) {
        Ok(error) => error.text("message"),
        Err(_) => members::text(error),
    };
    message.map_or_else(
        || "the engine failed".to_owned(),
        |message| message.into_owned(),
    )
}
