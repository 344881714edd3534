//! What a request counts in its tenant's limits: reserved when it is admitted, corrected by what was used. Pure.

/// How tokens count.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    /// What a prompt token counts that the engine had cached.
    pub cached_weight: f64,
    /// Output tokens that are reserved for each choice of a request that may generate more.
    pub output_reserve: u64,
}

/// What is known of a request when it is admitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Known {
    pub prompt_tokens: u64,
    /// Tokens of the prompt that a worker has cached.
    pub cached_tokens: u64,
    /// The most output tokens that the client allows for each choice.
    pub max_tokens: Option<u64>,
    /// What the client calls `max_tokens`.
    pub max_tokens_name: &'static str,
    /// Answers that the client asks for.
    pub choices: u64,
    /// A field of another type than engines define, so that it cannot be known what they make of it.
    pub odd_value: Option<&'static str>,
    /// Whether the engine generates anything.
    pub generates: bool,
}

/// What a request counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    pub requests: u64,
    pub input_tokens: u64,
    pub output_tokens: u64,
}

/// No engine has this many tokens in one request; a larger number in a body is a mistake.
const MAX_TOKENS: u64 = 1 << 32;

impl Weights {
    pub fn reserve(&self, known: &Known) -> Amount {
        let each = match known.max_tokens {
            _ if !known.generates => 0,
            Some(max) => max.min(self.output_reserve),
            None => self.output_reserve,
        };
        Amount {
            requests: 1,
            input_tokens: self.input(known.prompt_tokens, known.cached_tokens),
            output_tokens: each
                .saturating_mul(known.choices.clamp(1, MAX_TOKENS))
                .min(MAX_TOKENS),
        }
    }

    /// What was used, by the engine's own numbers.
    pub fn used(&self, prompt_tokens: u64, cached_tokens: u64, output_tokens: u64) -> Amount {
        Amount {
            requests: 1,
            input_tokens: self.input(prompt_tokens, cached_tokens),
            output_tokens: output_tokens.min(MAX_TOKENS),
        }
    }

    fn input(&self, prompt_tokens: u64, cached_tokens: u64) -> u64 {
        let prompt_tokens = prompt_tokens.min(MAX_TOKENS);
        let cached = cached_tokens.min(prompt_tokens);
        let weighted = (cached as f64 * self.cached_weight).ceil() as u64;
        prompt_tokens - cached + weighted.min(cached)
    }
}

impl Amount {
    pub fn tokens(&self) -> u64 {
        self.input_tokens.saturating_add(self.output_tokens)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WEIGHTS: Weights = Weights {
        cached_weight: 0.1,
        output_reserve: 500,
    };

    fn check(known: Known, input: u64, output: u64) {
        let expected = Amount {
            requests: 1,
            input_tokens: input,
            output_tokens: output,
        };
        assert_eq!(WEIGHTS.reserve(&known), expected, "{known:?}");
    }

    #[test]
    fn the_prompt_and_a_share_of_the_output_are_reserved() {
        let known = Known {
            prompt_tokens: 1_000,
            choices: 1,
            generates: true,
            ..Known::default()
        };
        check(known, 1_000, 500);
        let max = |max_tokens| Known {
            max_tokens: Some(max_tokens),
            ..known
        };
        check(max(16), 1_000, 16);
        check(max(4_000), 1_000, 500);
        check(
            Known {
                choices: 3,
                ..max(16)
            },
            1_000,
            48,
        );
        check(
            Known {
                cached_tokens: 905,
                ..known
            },
            95 + 91,
            500,
        );
        check(
            Known {
                generates: false,
                ..known
            },
            1_000,
            0,
        );
        check(
            Known {
                choices: u64::MAX,
                ..known
            },
            1_000,
            MAX_TOKENS,
        );
    }

    proptest! {
        #[test]
        fn what_was_used_costs_at_most_its_tokens(prompt: u64, cached: u64, output: u64, weight in 0.0..=1.0) {
            let weights = Weights { cached_weight: weight, ..WEIGHTS };
            let used = weights.used(prompt, cached, output);
            prop_assert!(used.input_tokens <= prompt && used.output_tokens <= output);
            let whole = Weights { cached_weight: 1.0, ..WEIGHTS }.used(prompt, cached, output);
            prop_assert_eq!(whole.input_tokens, prompt.min(MAX_TOKENS));
            prop_assert!(used.tokens() <= whole.tokens());
        }
    }
}
