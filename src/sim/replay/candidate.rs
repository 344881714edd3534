//! What the modelled formulas of other routers, and the one in seconds, know of a request and of a worker. Pure.

use crate::sim::step_time::StepTimes;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Prompt {
    pub(super) tokens: u32,
    /// The mean length of answers so far.
    pub(super) answer_tokens: f64,
    /// The mean rate of the workers, in prompt tokens a second.
    pub(super) mean_rate: f64,
}

/// A worker as the formulas see it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Candidate {
    /// All requests there: waiting, computing, generating.
    pub(super) requests: u32,
    /// Queued prefill tokens.
    pub(super) queued_tokens: u64,
    /// Prompt tokens of all requests of the worker.
    pub(super) active_tokens: u64,
    /// Cached tokens of this prompt.
    pub(super) cached_tokens: u32,
    /// By the engine's own metrics: requests that wait, and the used part of the KV memory.
    pub(super) waiting: u32,
    pub(super) kv_usage: f64,
    pub(super) constants: Constants,
    /// A random number that breaks ties.
    pub(super) tie: u64,
}

/// How fast a worker is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Constants {
    /// Prompt tokens a second.
    pub(super) rate: f64,
    /// Seconds of a step; more for each answer; more for each token of their contexts.
    pub(super) step: f64,
    pub(super) answer: f64,
    pub(super) context_token: f64,
    /// Requests that it computes at the same time.
    pub(super) slots: f64,
}

impl Candidate {
    pub(super) fn new_tokens(&self, prompt: &Prompt) -> u32 {
        prompt.tokens.saturating_sub(self.cached_tokens)
    }
}

impl Constants {
    pub(super) fn new(times: &StepTimes, slots: u32) -> Self {
        let [step, answer, context_token, prompt_token] = times.seconds();
        Self {
            rate: 1.0 / prompt_token,
            step,
            answer,
            context_token,
            slots: slots.into(),
        }
    }
}
