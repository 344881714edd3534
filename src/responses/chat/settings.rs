//! How a request of the Responses API becomes a chat completion.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How requests are converted for workers that speak chat completions only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ChatSettings {
    /// System messages after the first message of a user or assistant. Many templates accept only one, at the head.
    pub system_messages: SystemMessages,
    /// The member that has `max_output_tokens`. Engines ignore or refuse the one that they do not know.
    pub output_limit_name: OutputLimit,
    /// Tools that a chat completion cannot have, such as `web_search` and `local_shell`.
    pub unsupported_tools: UnsupportedTools,
    /// Arguments of earlier calls that are no JSON object. Some templates fail on them.
    pub invalid_arguments: InvalidArguments,
    /// Send developer messages with the role `developer`, for templates that know it (gpt-oss). Otherwise they are
    /// system messages.
    pub developer_role: bool,
    /// Mark the messages of an answer with `phase`: `commentary` if a call follows, `final_answer` at the end of a
    /// complete answer. For models that were trained to comment on their calls.
    pub message_phases: bool,
}

/// What becomes of a later system message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SystemMessages {
    /// It stays where it is, unless the router has the model's tokenizer and its template fails on such a message: then
    /// it is appended to the one at the head.
    #[default]
    Auto,
    /// It stays where it is.
    InPlace,
    /// It is appended to the system message at the head. This changes the start of the prompt, so that nothing of it
    /// is cached.
    MergeIntoFirst,
}

/// The name of the limit of an answer's tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OutputLimit {
    /// vLLM, SGLang and others of this time.
    #[default]
    MaxCompletionTokens,
    /// Engines from before OpenAI renamed it.
    MaxTokens,
}

impl OutputLimit {
    pub(super) fn member(self) -> &'static str {
        match self {
            Self::MaxCompletionTokens => "max_completion_tokens",
            Self::MaxTokens => "max_tokens",
        }
    }
}

/// What becomes of a tool that a chat completion cannot have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum UnsupportedTools {
    /// The request is refused with 400, unless another worker speaks the Responses API.
    Refuse,
    /// They are left out, as no model could be answered by them. The header `x-warmroute-tools-left-out` names them.
    #[default]
    Ignore,
}

/// What becomes of arguments that are no JSON object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum InvalidArguments {
    /// They are sent as the model wrote them, or as `{}` if it wrote none.
    #[default]
    Keep,
    /// They are replaced by `{}`.
    EmptyObject,
}
