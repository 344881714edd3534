//! The types that the parts of this module share. This file imports none of them.

use crate::observe::metrics::words;

words! {
    /// The APIs whose request bodies this module reads.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Api {
        Chat = "chat",
        Completions = "completions",
        Responses = "responses",
        Embeddings = "embeddings",
        Rerank = "rerank",
        Tokenize = "tokenize",
        Detokenize = "detokenize",
        /// Anthropic's Messages.
        Messages = "messages",
        /// The tokens of a Messages request, counted.
        CountTokens = "count_tokens",
        /// vLLM's tokens in, tokens out: `/inference/v1/generate`.
        Generate = "generate",
        /// An endpoint that the configuration lists, of which the router knows the model only.
        Other = "other",
    }
}

impl Api {
    /// Whether the engine computes the prompt into its KV cache, so that its prefix can be cached.
    pub fn generates(self) -> bool {
        matches!(
            self,
            Api::Chat | Api::Completions | Api::Responses | Api::Messages | Api::Generate
        )
    }

    /// Whether the engine computes the prompt at all. One that only counts or converts its tokens does not.
    pub fn computes_prompt(self) -> bool {
        !matches!(self, Api::Tokenize | Api::Detokenize | Api::CountTokens)
    }

    /// Whether answers have choices, and streams end in `[DONE]`.
    pub fn has_choices(self) -> bool {
        matches!(self, Api::Chat | Api::Completions | Api::Generate)
    }

    /// Whether bodies are those of Anthropic's Messages.
    pub fn is_messages(self) -> bool {
        matches!(self, Api::Messages | Api::CountTokens)
    }
}

/// The block hashes of a prompt's canonical bytes, in the order in which engines render a prompt: template
/// arguments, instructions, tools, then the conversation.
#[derive(Debug, Default, PartialEq)]
pub struct HashedPrompt {
    pub blocks: Vec<LocalBlock>,
    /// Canonical bytes of the whole prompt, including the bytes after the last full block.
    pub bytes: u64,
}

/// The hash of one block alone. Hashes that cover the whole prefix are built from these in `kv::text_block`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalBlock {
    pub hash: u64,
    pub bytes: u32,
}

/// The parts of a prompt. A body may have them in any order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Section {
    Template,
    /// The arguments of the template, which a body has beside it.
    TemplateKwargs,
    Instructions,
    Tools,
    Functions,
    Documents,
    /// Messages or input. Only this section grows from turn to turn.
    Conversation,
}

impl Section {
    /// The place in the order in which engines render a prompt. Sections of one place stay in the body's order.
    pub(super) fn place(self) -> u8 {
        match self {
            Section::Template => 0,
            Section::TemplateKwargs => 1,
            Section::Instructions => 2,
            Section::Tools | Section::Functions | Section::Documents => 3,
            Section::Conversation => 4,
        }
    }
}

/// Lists and objects inside each other, the body itself among them. JSON schemas of tools need about ten. Readers
/// below, and those of engines, have stacks for 128 and more.
pub(super) const MAX_NESTING: usize = 100;

/// Starts a text that some clients put first in the system prompt and change with every request. Engines drop it, because
/// otherwise no two requests would share a prefix.
pub(super) const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// Why a request body is refused.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// Not JSON, or not an object.
    #[error("the request body is not valid JSON: {0}")]
    Json(String),
    /// A field has a type that no engine accepts.
    #[error("`{param}` must be {expected}")]
    Type {
        param: &'static str,
        expected: &'static str,
    },
    #[error("the request body is not a valid form: {0}")]
    Form(&'static str),
    #[error("`{0}` is set by the router and cannot be part of a request")]
    Forbidden(&'static str),
    #[error(
        "`{0}` is nested too deeply: a request body may have {max} levels of lists and objects",
        max = MAX_NESTING
    )]
    TooDeep(String),
}
