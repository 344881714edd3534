//! How a request of the Responses API becomes a chat completion.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How requests are converted for workers that speak chat completions only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ChatSettings {
    /// System messages after the first message of a user or assistant. Many templates accept only one, at the head.
    pub system_messages: SystemMessages,
    /// Tools that a chat completion cannot have: hosted tools, and custom tools with a grammar.
    pub unsupported_tools: UnsupportedTools,
    /// Arguments of earlier calls that are no JSON object. Some templates fail on them.
    pub invalid_arguments: InvalidArguments,
    /// Send developer messages with the role `developer`, for templates that know it (gpt-oss). Otherwise they are
    /// system messages.
    pub developer_role: bool,
}

/// What becomes of a later system message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SystemMessages {
    /// It stays where it is.
    #[default]
    InPlace,
    /// It is appended to the system message at the head. This changes the start of the prompt, so that nothing of it
    /// is cached.
    MergeIntoFirst,
}

/// What becomes of a tool that a chat completion cannot have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum UnsupportedTools {
    /// The request is refused with 400, unless another worker speaks the Responses API.
    #[default]
    Refuse,
    /// A hosted tool is left out, a grammar is ignored.
    Ignore,
}

/// What becomes of arguments that are no JSON object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum InvalidArguments {
    /// They are sent as the model wrote them.
    #[default]
    Keep,
    /// They are replaced by `{}`.
    EmptyObject,
}
