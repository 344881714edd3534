//! What an answer says so far, and how it is written: whole or event by event. Pure.

use serde::Serialize;

use super::ask::{Api, Ask};
use super::problem::Problem;
use super::transfer::{Handed, Received};
use super::{completions, responses, tokenizer};
use crate::sim::engine::Event;

pub(crate) const FINGERPRINT: &str = "vllm-0.32.0-sim";

/// A request and the tokens that its answer has up to now, one list for each of its prompts.
#[derive(Debug)]
pub(crate) struct Transcript {
    pub(crate) ask: Ask,
    pub(crate) answers: Vec<Vec<u32>>,
    pub(crate) cached_tokens: usize,
    /// The prompt came from another engine.
    pub(crate) received: Option<Received>,
    /// What a prefill leg is answered with.
    pub(crate) handed: Option<Handed>,
    /// The model ends its answer, and not the limit.
    pub(crate) stops: bool,
    block_tokens: usize,
    open_answers: usize,
    /// The `sequence_number` of the next Responses event.
    pub(crate) next_number: u64,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    pub(crate) total_tokens: usize,
    pub(crate) completion_tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_tokens_details: Option<PromptTokensDetails>,
    /// Always null where it is there at all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) completion_tokens_details: Option<()>,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct PromptTokensDetails {
    cached_tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    created_cache_tokens: Option<Option<usize>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    multimodal_tokens: Option<()>,
}

impl Transcript {
    pub(crate) fn new(ask: Ask, block_tokens: usize) -> Self {
        let prompts = ask.prompts.len();
        Self {
            answers: vec![Vec::with_capacity(ask.answer_tokens); prompts],
            ask,
            cached_tokens: 0,
            received: None,
            handed: None,
            stops: false,
            block_tokens,
            open_answers: prompts,
            next_number: 0,
        }
    }

    /// Notes what the engine said about the prompt with this index; the token, if there is one.
    pub(crate) fn on_event(&mut self, index: usize, event: Event) -> Option<u32> {
        match event {
            Event::First {
                token,
                cached_tokens,
            } => {
                self.cached_tokens += cached_tokens;
                self.answers[index].push(token);
                Some(token)
            }
            Event::Token { token } => {
                self.answers[index].push(token);
                Some(token)
            }
            Event::Done { .. } => {
                self.open_answers -= 1;
                None
            }
        }
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

    /// But for a fault switch, answers end at their limit.
    pub(crate) fn finish_reason(&self, index: usize) -> Option<&'static str> {
        let reason = if self.stops { "stop" } else { "length" };
        (self.answers[index].len() == self.ask.answer_tokens).then_some(reason)
    }

    /// As usage tells it: of a prompt that was received, what its connector says.
    pub(crate) fn told_cached_tokens(&self) -> usize {
        self.received
            .map_or(self.cached_tokens, |received| received.told_cached_tokens)
    }

    /// As in an answer that comes whole.
    pub(crate) fn usage(&self) -> Usage {
        Usage {
            prompt_tokens_details: Some(PromptTokensDetails {
                cached_tokens: self.told_cached_tokens(),
                created_cache_tokens: Some(self.created_cache_tokens()),
                multimodal_tokens: Some(()),
            }),
            ..self.running_usage()
        }
    }

    /// As in each event of a stream that was asked for it.
    pub(crate) fn running_usage(&self) -> Usage {
        Usage {
            prompt_tokens_details: None,
            completion_tokens_details: Some(()),
            ..self.counts()
        }
    }

    /// As in the last event of a stream, which leaves out what is null.
    pub(crate) fn final_usage(&self) -> Usage {
        Usage {
            prompt_tokens_details: Some(PromptTokensDetails {
                cached_tokens: self.told_cached_tokens(),
                created_cache_tokens: self.created_cache_tokens().map(Some),
                multimodal_tokens: None,
            }),
            ..self.counts()
        }
    }

    fn counts(&self) -> Usage {
        let prompt_tokens = self.ask.prompt_tokens();
        let completion_tokens = self.completion_tokens();
        Usage {
            prompt_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            completion_tokens,
            prompt_tokens_details: None,
            completion_tokens_details: None,
        }
    }

    /// Prompt tokens whose blocks are new in the cache; none if the prompts do not fill a block.
    fn created_cache_tokens(&self) -> Option<usize> {
        let full_blocks = self
            .ask
            .prompts
            .iter()
            .map(|it| it.len() / self.block_tokens);
        let cacheable = full_blocks.sum::<usize>() * self.block_tokens;
        let created = match self.received {
            Some(_) => 0,
            None => cacheable.saturating_sub(self.cached_tokens),
        };
        (cacheable > 0).then_some(created)
    }

    /// The whole answer as one JSON body.
    pub(crate) fn whole(&self) -> String {
        match self.ask.api {
            Api::Chat => completions::whole_chat(self),
            Api::Completions => completions::whole_completion(self),
            Api::Responses => responses::whole(self),
        }
    }

    /// The events before the first token, each as one chunk.
    pub(crate) fn opening(&mut self) -> Vec<String> {
        match self.ask.api {
            Api::Chat => vec![completions::opening_chat(self)],
            Api::Completions => Vec::new(),
            Api::Responses => responses::opening(self),
        }
    }

    /// The event for a token that was just noted.
    pub(crate) fn token(&mut self, index: usize, token: u32) -> String {
        let text = tokenizer::decode(&[token]);
        match self.ask.api {
            Api::Chat => completions::chat_token(self, index, &text),
            Api::Completions => completions::completion_token(self, index, &text),
            Api::Responses => responses::token(self, &text),
        }
    }

    /// The events after the last token.
    pub(crate) fn closing(&mut self) -> Vec<String> {
        match self.ask.api {
            Api::Chat | Api::Completions => completions::closing(self),
            Api::Responses => responses::closing(self),
        }
    }

    /// The events that report an error in the middle. A Responses stream has none: it is cut.
    pub(crate) fn failure(&self, problem: &Problem) -> Option<Vec<String>> {
        match self.ask.api {
            Api::Chat | Api::Completions => {
                let error = format!("data: {}\n\n", problem.event_body());
                Some(vec![error, completions::DONE.to_owned()])
            }
            Api::Responses => None,
        }
    }
}

pub(crate) fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("these shapes have string keys only")
}

#[cfg(test)]
mod tests;
