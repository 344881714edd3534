//! A request and what is generated for it so far. Pure.

use serde_json::Value;

use super::request::GenerationRequest;
use super::tokenizer;
use super::transfer::fetch::Received;
use crate::sim::engine::Event;

#[derive(Debug)]
pub(crate) struct Generation {
    pub(crate) request: GenerationRequest,
    /// The generated tokens, one list for each prompt of the request.
    pub(crate) answers: Vec<Vec<u32>>,
    pub(crate) cached_tokens: usize,
    /// Set if the prompt's blocks came from another engine.
    pub(crate) received: Option<Received>,
    /// The `kv_transfer_params` of a prefill leg's answer.
    pub(crate) transfer_params: Option<Value>,
    /// The finish reason is "stop" instead of "length".
    pub(crate) stops: bool,
    block_tokens: usize,
    open_answers: usize,
    next_sequence_number: u64,
}

impl Generation {
    pub(crate) fn new(request: GenerationRequest, block_tokens: usize) -> Self {
        let prompts = request.prompts.len();
        Self {
            answers: vec![Vec::with_capacity(request.answer_tokens); prompts],
            request,
            cached_tokens: 0,
            received: None,
            transfer_params: None,
            stops: false,
            block_tokens,
            open_answers: prompts,
            next_sequence_number: 0,
        }
    }

    /// Applies an engine event for the prompt with this index. Returns the generated token, if the event has one.
    pub(crate) fn on_event(&mut self, index: usize, event: Event) -> Option<u32> {
        let token = match event {
            Event::First {
                token,
                cached_tokens,
            } => {
                // A prompt's further answers find it cached, which engines do not report.
                if index.is_multiple_of(self.request.choices) {
                    self.cached_tokens += cached_tokens;
                }
                token
            }
            Event::Token { token } => token,
            Event::Done { .. } => {
                self.open_answers -= 1;
                return None;
            }
        };
        self.answers[index].push(token);
        Some(token)
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.open_answers == 0
    }

    pub(crate) fn completion_tokens(&self) -> usize {
        self.answers.iter().map(Vec::len).sum()
    }

    pub(crate) fn text(&self, index: usize) -> String {
        tokenizer::decode(&self.answers[index])
    }

    /// The finish reason, once the answer has all its tokens.
    pub(crate) fn finish_reason(&self, index: usize) -> Option<&'static str> {
        let reason = if self.stops { "stop" } else { "length" };
        (self.answers[index].len() == self.request.answer_tokens).then_some(reason)
    }

    /// The cached tokens in the reported usage. For a received prompt, the connector decides what they are.
    pub(crate) fn reported_cached_tokens(&self) -> usize {
        let received = self.received.as_ref();
        received.map_or(self.cached_tokens, |received| {
            received.reported_cached_tokens
        })
    }

    /// Prompt tokens whose blocks are new in the cache; `None` if the prompts do not fill a block.
    pub(crate) fn created_cache_tokens(&self) -> Option<usize> {
        let prompts = self.request.own_prompts();
        let full_blocks: usize = prompts.map(|prompt| prompt.len() / self.block_tokens).sum();
        let cacheable = full_blocks * self.block_tokens;
        let created = match self.received {
            Some(_) => 0,
            None => cacheable.saturating_sub(self.cached_tokens),
        };
        (cacheable > 0).then_some(created)
    }

    /// The `sequence_number` of the next Responses event.
    pub(crate) fn next_sequence_number(&mut self) -> u64 {
        self.next_sequence_number += 1;
        self.next_sequence_number - 1
    }
}
