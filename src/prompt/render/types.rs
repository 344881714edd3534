//! The types that the APIs' readers and the renderer share. This file imports none of them.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::prompt::template::ContentFormat;

/// The start options of a model's engines that change how they render prompts.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// `--default-chat-template-kwargs`.
    pub chat_template_kwargs: Map<String, Value>,
    /// `--chat-template-content-format`; `None` for `auto`.
    pub content_format: Option<ContentFormat>,
    /// `--exclude-tools-when-tool-choice-none`.
    pub exclude_tools_when_tool_choice_none: bool,
    /// `--reasoning-effort-map`: what the template gets for the effort that a request asks for.
    pub reasoning_effort_map: BTreeMap<String, String>,
}

impl Options {
    pub(super) fn effort(&self, asked: Option<Value>) -> Option<Value> {
        let mapped = |effort: &Value| self.reasoning_effort_map.get(effort.as_str()?).cloned();
        match asked.as_ref().and_then(mapped) {
            Some(mapped) => Some(mapped.into()),
            None => asked,
        }
    }
}

/// Why the router cannot tokenize a request itself. The request is then routed by predicted prefixes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenizeError {
    /// The API has no prompt to compute, or the model has no chat template because its engine renders chats in code.
    #[error("no chat template can be used for this API and model")]
    Api,
    #[error("the body does not fit this API: {0}")]
    Body(String),
    #[error("the engine will refuse the request: {0}")]
    Refused(String),
    #[error("the effect of `{0}` depends on the engine")]
    Field(&'static str),
    #[error("the tokenizer failed: {0}")]
    Tokenizer(String),
    #[error("the rendered text of {bytes} bytes is longer than the limit")]
    TooLong { bytes: usize },
}

impl TokenizeError {
    /// Every value of `reason`.
    pub const REASONS: [&'static str; 6] =
        ["api", "body", "refused", "field", "tokenizer", "too_long"];

    /// The label value in metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            TokenizeError::Api => "api",
            TokenizeError::Body(_) => "body",
            TokenizeError::Refused(_) => "refused",
            TokenizeError::Field(_) => "field",
            TokenizeError::Tokenizer(_) => "tokenizer",
            TokenizeError::TooLong { .. } => "too_long",
        }
    }
}

impl From<serde_json::Error> for TokenizeError {
    fn from(error: serde_json::Error) -> Self {
        Self::Body(error.to_string())
    }
}

pub(super) fn refused(why: &str) -> TokenizeError {
    TokenizeError::Refused(why.to_owned())
}

/// The prompt as the engine tokenizes it.
#[derive(Debug, PartialEq)]
pub enum RenderedPrompt {
    Text(RenderedText),
    /// Token ids from the client, used unchanged.
    Ids(Vec<u32>),
}

#[derive(Debug, Default, PartialEq)]
pub struct RenderedText {
    pub text: String,
    /// Whether BOS and EOS are added.
    pub add_special_tokens: bool,
    /// Bytes before the first image; all bytes if there is none. What the engine puts in place of an image is not known.
    pub known_bytes: usize,
}

impl RenderedText {
    /// A text without images.
    pub(super) fn complete(text: String, add_special_tokens: bool) -> Self {
        let known_bytes = text.len();
        Self {
            text,
            add_special_tokens,
            known_bytes,
        }
    }
}
