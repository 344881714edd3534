//! Writes an answer in the format of its API, whole or event by event. Pure.

mod completions;
mod items;
mod messages;
mod responses;

use super::error::ApiError;
use super::generation::Generation;
use super::json::{DONE, json};
use super::request::Api;
use super::tokenizer;

impl Generation {
    /// The whole answer as one JSON body.
    pub(crate) fn whole(&self) -> String {
        json(&match self.request.api {
            Api::Chat => completions::whole_chat(self),
            Api::Completions => completions::whole_completion(self),
            Api::Responses => responses::finished(self),
            Api::Messages => messages::whole(self),
        })
    }

    /// The events before the first token, one chunk each.
    pub(crate) fn opening(&mut self) -> Vec<String> {
        match self.request.api {
            Api::Chat => completions::role_chunks(self),
            Api::Completions => Vec::new(),
            Api::Responses => responses::opening(self),
            Api::Messages => messages::opening(self),
        }
    }

    /// The event for the token that was added last.
    pub(crate) fn token(&mut self, index: usize, token: u32) -> String {
        let text = tokenizer::decode(&[token]);
        match self.request.api {
            Api::Chat => completions::chat_chunk(self, index, &text),
            Api::Completions => completions::completion_chunk(self, index, &text),
            Api::Responses => responses::token(self, &text),
            Api::Messages => messages::token(self, &text),
        }
    }

    /// The events after the last token.
    pub(crate) fn closing(&mut self) -> Vec<String> {
        match self.request.api {
            Api::Chat | Api::Completions => completions::closing(self),
            Api::Responses => responses::closing(self),
            Api::Messages => messages::closing(self),
        }
    }

    /// The events that report an error in mid-stream. A Responses stream has none: its connection is closed.
    pub(crate) fn failure(&self, error: &ApiError) -> Option<Vec<String>> {
        match self.request.api {
            Api::Chat | Api::Completions => {
                let error = format!("data: {}\n\n", error.event_body());
                Some(vec![error, DONE.to_owned()])
            }
            Api::Responses => None,
            Api::Messages => Some(vec![messages::failure(error)]),
        }
    }
}

#[cfg(test)]
mod tests;
