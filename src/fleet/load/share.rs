//! Requests with their tokens, by which loads are added up. Pure.

use serde::Serialize;

/// What is at a worker or at one of its ranks, or waits for it: all of it, or one part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LoadShare {
    pub requests: u32,
    /// Uncached prompt tokens of the requests without a first token yet.
    pub queued_tokens: u64,
    /// Prompt tokens of all requests.
    pub context_tokens: u64,
}

impl LoadShare {
    /// A request whose prompt is not computed.
    pub fn of_request(prompt_tokens: u32, uncached_tokens: u32) -> Self {
        Self {
            requests: 1,
            queued_tokens: uncached_tokens.into(),
            context_tokens: prompt_tokens.into(),
        }
    }

    /// How many of the prompts are not computed yet, if as many as of their tokens: more than are, where long ones wait.
    pub fn waiting_prompts(&self) -> f64 {
        let part = self.queued_tokens as f64 / self.context_tokens.max(1) as f64;
        f64::from(self.requests) * part.min(1.0)
    }

    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            requests: self.requests.saturating_add(other.requests),
            queued_tokens: self.queued_tokens.saturating_add(other.queued_tokens),
            context_tokens: self.context_tokens.saturating_add(other.context_tokens),
        }
    }

    #[must_use]
    pub fn minus(self, other: Self) -> Self {
        Self {
            requests: self.requests.saturating_sub(other.requests),
            queued_tokens: self.queued_tokens.saturating_sub(other.queued_tokens),
            context_tokens: self.context_tokens.saturating_sub(other.context_tokens),
        }
    }
}
