//! A request inside the engine model, waiting or running. Pure.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::cache::{Label, Path};
use super::types::{Counters, Event, Output, RequestKey};

/// A request and its tokens so far.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) key: RequestKey,
    /// The prompt, followed by the generated tokens.
    pub(super) tokens: Vec<u32>,
    pub(super) prompt_tokens: usize,
    pub(super) answer: Vec<u32>,
    pub(super) root: u64,
    pub(super) label: Option<Arc<Label>>,
    pub(super) received_tokens: usize,
    pub(super) keep_for: Option<Duration>,
    pub(super) arrived: Instant,
    /// Set at the first admission and not changed after a preemption, because it is reported once.
    pub(super) cached_tokens: Option<usize>,
}

/// A running sequence with its blocks.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) sequence: Sequence,
    pub(super) path: Path,
    /// Tokens that are computed, and tokens that the current step computes in addition.
    pub(super) computed: usize,
    pub(super) scheduled: usize,
    /// The prompt's blocks came from a prefill engine.
    pub(super) is_received: bool,
}

impl Running {
    /// Prefill is done, and only the last token has to be computed.
    pub(super) fn is_decoding(&self) -> bool {
        let sequence = &self.sequence;
        let is_prefilled = sequence.tokens.len() > sequence.prompt_tokens || self.is_received;
        is_prefilled && self.computed + 1 == sequence.tokens.len()
    }
}

impl Sequence {
    /// Generates the next token. True if the request is finished.
    pub(super) fn generate(&mut self, counters: &mut Counters, outputs: &mut Vec<Output>) -> bool {
        let key = self.key;
        let generated = self.tokens.len() - self.prompt_tokens;
        let cached_tokens = self
            .cached_tokens
            .expect("set when the request was admitted");
        if generated == 0 {
            counters.prompt_tokens += self.prompt_tokens as u64;
        }
        if let Some(&token) = self.answer.get(generated) {
            self.tokens.push(token);
            counters.generation_tokens += 1;
            let event = match generated {
                0 => Event::First {
                    token,
                    cached_tokens,
                },
                _ => Event::Token { token },
            };
            outputs.push(Output { key, event });
        }
        let done = generated + 1 >= self.answer.len();
        if done {
            counters.finished += 1;
            let event = Event::Done { cached_tokens };
            outputs.push(Output { key, event });
        }
        done
    }
}
