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
    let plus = |raw: Option<&RawValue>, more: u64| number(raw).unwrap_or(0).saturating_add(more);
    let completion = plus(wire.completion_tokens, earlier.answer);
    let cached = wire
        .prompt_tokens_details
        .and_then(|details| details.cached_tokens);
    let details = wire.completion_tokens_details;
    let reasoning = details.and_then(|details| details.reasoning_tokens);
    let of_reasoning = plus(reasoning, earlier.reasoning);
    let total = earlier.prompt.saturating_add(completion);
    for (raw, count) in [
        (wire.prompt_tokens, earlier.prompt),
        (wire.completion_tokens, completion),
        (wire.total_tokens, total),
        (cached, earlier.cached.min(earlier.prompt)),
        (reasoning, of_reasoning),
    ] {
        if let Some(raw) = raw.filter(|raw| number(Some(raw)).is_some()) {
            splice.replace(raw.get(), count.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_no_answer_has_overflows_no_sum() {
        const USAGE: &str = r#"{"prompt_tokens":1,"completion_tokens":18446744073709551615,"total_tokens":2,"completion_tokens_details":{"reasoning_tokens":18446744073709551615}}"#;
        let earlier = Earlier {
            prompt: 7,
            answer: 3,
            reasoning: 1,
            cached: 0,
        };
        let usage: &RawValue = serde_json::from_str(USAGE).unwrap();
        let mut splice = Splice::new(usage.get().as_bytes());
        correct(usage, earlier, &mut splice);
        splice.apply();
        let bytes = splice.finish(USAGE.len()).unwrap();
        let corrected: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(corrected["prompt_tokens"], 7);
        assert_eq!(corrected["total_tokens"], u64::MAX);
    }
}
