//! The numbers of one object of usage, under the names of every API. Pure.

use crate::json_scan::Scan;
use crate::relay::answer::engine_answer::Usage;

/// No engine has as many tokens in one answer. A larger number is a defect, such as -1 without its sign: it would make counters
/// wrap, and sums of what tenants use wrong for ever.
const MAX_TOKENS: u64 = 1 << 32;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Reported {
    /// Prompt tokens: of chat completions with the cached ones, of Messages without them.
    input: Option<u64>,
    output: Option<u64>,
    /// Some engines say no more of a rerank.
    total: Option<u64>,
    cached: u64,
    /// Of Messages: tokens that were written into the cache.
    written: u64,
    reasoning: Option<u64>,
}

impl Reported {
    /// `None` if it has no number that counts, or one above [`MAX_TOKENS`].
    pub(super) fn read(object: &[u8]) -> Option<Self> {
        Self::take(&mut Scan::of_bytes(object)?)?
    }

    /// As [`Self::read`], of the object that begins here, if one does.
    pub(super) fn take(scan: &mut Scan<'_, true>) -> Option<Option<Self>> {
        let mut found = Self::default();
        let mut most = 0_u64;
        let mut number = |json: &str| {
            let tokens: Option<u64> = json.parse().ok();
            most = most.max(tokens.unwrap_or(0));
            tokens
        };
        // An engine that says a number under two names counts as it says the most.
        scan.each_member(|scan, name| {
            match &*name {
                "prompt_tokens" | "input_tokens" => {
                    found.input = number(scan.value()?).max(found.input);
                }
                "completion_tokens" | "output_tokens" => {
                    found.output = number(scan.value()?).max(found.output);
                }
                "total_tokens" => found.total = number(scan.value()?).max(found.total),
                "cached_tokens" | "cache_read_input_tokens" => {
                    found.cached = number(scan.value()?).unwrap_or(0);
                }
                "cache_creation_input_tokens" => {
                    found.written = number(scan.value()?).unwrap_or(0);
                }
                "prompt_tokens_details" | "input_tokens_details"
                    if scan.first_byte() == Some(b'{') =>
                {
                    scan.object(|name, value| {
                        if name == "cached_tokens" {
                            found.cached = number(value).unwrap_or(0);
                        }
                    })?;
                }
                "completion_tokens_details" | "output_tokens_details"
                    if scan.first_byte() == Some(b'{') =>
                {
                    scan.object(|name, value| {
                        if name == "reasoning_tokens" {
                            found.reasoning = number(value);
                        }
                    })?;
                }
                _ => {
                    scan.value()?;
                }
            }
            Some(())
        })?;
        let counts = [found.input, found.output, found.total];
        let is_any = most <= MAX_TOKENS && counts.iter().any(Option::is_some);
        Some(is_any.then_some(found))
    }

    /// The usage of an answer of any API but Messages.
    pub(super) fn usage(self) -> Option<Usage> {
        let output_tokens = self.output.unwrap_or(0);
        let rest = || Some(self.total?.saturating_sub(output_tokens));
        Some(Usage {
            prompt_tokens: self.input.or_else(rest)?,
            cached_tokens: self.cached,
            output_tokens,
            reasoning_tokens: self.reasoning,
        })
    }

    /// The usage of an answer of Messages. The event at a stream's end may report the output only, and that at its begin has
    /// the input then. Cached tokens, and those that were written into the cache, are no part of the input tokens here.
    pub(super) fn usage_of_message(last: Self, first: Self) -> Option<Usage> {
        let has_input = |reported: &Self| reported.input.is_some();
        let input = [last, first].into_iter().find(has_input)?;
        let counts = [input.input.unwrap_or(0), input.written, input.cached];
        let add = |sum: u64, count: u64| sum.saturating_add(count);
        Some(Usage {
            prompt_tokens: counts.into_iter().fold(0, add),
            cached_tokens: input.cached,
            output_tokens: last.output.or(first.output)?,
            reasoning_tokens: last.reasoning,
        })
    }

    /// Both, of a list of answers.
    pub(super) fn plus(self, other: Self) -> Self {
        let both = |a: Option<u64>, b: Option<u64>| match (a, b) {
            (Some(a), Some(b)) => Some(a.saturating_add(b)),
            (one, other) => one.or(other),
        };
        Self {
            input: both(self.input, other.input),
            output: both(self.output, other.output),
            total: both(self.total, other.total),
            cached: self.cached.saturating_add(other.cached),
            written: self.written.saturating_add(other.written),
            reasoning: both(self.reasoning, other.reasoning),
        }
    }
}
