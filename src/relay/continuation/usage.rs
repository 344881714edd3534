//! The usage of a stream that several workers wrote: as if one had.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::relay::answer::splice::Splice;

/// What the client's stream has beyond what its last engine counts.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Earlier {
    /// Tokens of the client's prompt.
    pub(super) prompt: u64,
    /// Tokens of the answer that earlier workers wrote; of these, in reasoning.
    pub(super) answer: u64,
    pub(super) reasoning: u64,
    /// Tokens of the prompt that the first worker had cached, as the router expected.
    pub(super) cached: u64,
}

#[derive(Deserialize)]
#[serde(bound(deserialize = "'de: 'a"))]
struct Usage<'a> {
    prompt_tokens: Option<&'a RawValue>,
    completion_tokens: Option<&'a RawValue>,
    total_tokens: Option<&'a RawValue>,
    prompt_tokens_details: Option<Details<'a>>,
    completion_tokens_details: Option<Details<'a>>,
}

#[derive(Deserialize)]
#[serde(bound(deserialize = "'de: 'a"))]
struct Details<'a> {
    cached_tokens: Option<&'a RawValue>,
    reasoning_tokens: Option<&'a RawValue>,
}

/// Corrects the numbers of `usage`.
pub(super) fn correct(usage: &RawValue, earlier: Earlier, splice: &mut Splice<'_>) {
    let Ok(wire) = serde_json::from_str::<Usage<'_>>(usage.get()) else {
        return;
    };
    let number = |raw: Option<&RawValue>| raw.and_then(|raw| raw.get().parse::<u64>().ok());
    let completion = number(wire.completion_tokens).unwrap_or(0) + earlier.answer;
    let cached = wire
        .prompt_tokens_details
        .and_then(|details| details.cached_tokens);
    let details = wire.completion_tokens_details;
    let reasoning = details.and_then(|details| details.reasoning_tokens);
    let of_reasoning = number(reasoning).unwrap_or(0) + earlier.reasoning;
    for (raw, count) in [
        (wire.prompt_tokens, earlier.prompt),
        (wire.completion_tokens, completion),
        (wire.total_tokens, earlier.prompt + completion),
        (cached, earlier.cached.min(earlier.prompt)),
        (reasoning, of_reasoning),
    ] {
        if let Some(raw) = raw.filter(|raw| number(Some(raw)).is_some()) {
            splice.replace(raw.get(), count.to_string());
        }
    }
}
