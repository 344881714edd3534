//! The constants of a step, and what a worker was seen to do in a time.

use serde::Serialize;

/// Seconds that one more answer adds to a step, at a `batch` of 1. Measured on an H200 (`benches/engine_step.py`): 1.4e-5
/// with an 8B model, 6.4e-5 with a 32B one. It is 490 and 1,060 times [`CONTEXT`] there; answers show too little of the
/// difference to learn both, since both grow with the load.
pub const ANSWER: f64 = 2e-5;
/// Seconds that one more token of the contexts of its answers adds to a step, at a `batch` of 1: the bytes that the KV cache
/// has of a token, divided by the memory's bandwidth. Measured on an H200: 2.8e-8 with an 8B model, 6.0e-8 with a 32B one.
pub const CONTEXT: f64 = 3e-8;

/// What steps of a worker's engine take.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Speed {
    /// Seconds to compute one token of a prompt.
    pub prompt_token: f64,
    /// Seconds of a step, whatever is in it: about the bytes of the model's weights divided by the memory's bandwidth.
    pub step: f64,
    /// How many times [`ANSWER`] and [`CONTEXT`] the engine takes.
    pub batch: f64,
    /// The part of the time of computing prompts in which answers are generated all the same: 0 where a step does one after the
    /// other, 1 where prompts take nothing from answers (computed elsewhere, or beside them).
    pub overlap: f64,
}

impl Default for Speed {
    /// An engine of which nothing is known: 12,000 prompt tokens a second and 10 ms a step. An H200 computes 47,000 tokens
    /// a second of an 8B model and 11,000 of a 32B one, in steps of 4.6 and 17 ms; a factor of 3 costs a few percent of the
    /// time of answers.
    fn default() -> Self {
        Self {
            prompt_token: 1.0 / 12_000.0,
            step: 0.01,
            batch: 1.0,
            overlap: 0.0,
        }
    }
}

impl Speed {
    /// Seconds that one more answer adds to a step.
    #[inline]
    pub fn answer(&self) -> f64 {
        self.batch * ANSWER
    }

    /// Seconds that one more token of contexts adds to a step.
    #[inline]
    pub fn context(&self) -> f64 {
        self.batch * CONTEXT
    }

    /// Prompt tokens that it computes in a second.
    pub fn rate(&self) -> f64 {
        1.0 / self.prompt_token
    }

    /// Seconds of a step that generates a token of each of `answers`, whose contexts have `context_tokens` together.
    #[inline]
    pub fn step_time(&self, answers: f64, context_tokens: f64) -> f64 {
        self.step + self.answer() * answers + self.context() * context_tokens
    }

    /// The seconds that what is in a row is expected to take.
    pub fn seconds(&self, row: &Row) -> f64 {
        self.step * row.steps
            + self.answer() * row.answer_tokens
            + self.context() * row.context_tokens
            + self.prompt_token * (row.prompt_tokens - self.overlap * row.beside_tokens)
    }
}

/// What a worker did in a time, as far as the router knows it. Rows of several times add up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Row {
    pub seconds: f64,
    pub steps: f64,
    /// Tokens of answers: one of each answer in each step.
    pub answer_tokens: f64,
    /// In each step, the tokens of all contexts.
    pub context_tokens: f64,
    /// Prompt tokens computed.
    pub prompt_tokens: f64,
    /// The part of them that was computed while the answer was generated that the row is from.
    pub beside_tokens: f64,
    /// The time began when a request was sent that waited for nothing else, and ended with its first token.
    pub is_from_sent: bool,
}

impl Row {
    pub fn add(&mut self, other: &Row) {
        self.seconds += other.seconds;
        self.steps += other.steps;
        self.answer_tokens += other.answer_tokens;
        self.context_tokens += other.context_tokens;
        self.prompt_tokens += other.prompt_tokens;
        self.beside_tokens += other.beside_tokens;
    }
}
