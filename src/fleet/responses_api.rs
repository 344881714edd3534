//! Whether a worker serves the Responses API, or is sent chat completions instead.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How a worker is sent requests of the Responses API.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResponsesApi {
    /// As `chat` if the worker answers `POST /v1/responses` with 404, 405 or 501, or is SGLang, as the health checks find
    /// out; otherwise as `native`.
    #[default]
    Auto,
    /// To its `/v1/responses`.
    Native,
    /// As chat completions, which the router converts.
    Chat,
}

impl ResponsesApi {
    /// Whether the worker is sent chat completions. `lacks_responses`: what the health checks found out.
    pub fn is_chat(self, lacks_responses: bool) -> bool {
        match self {
            Self::Auto => lacks_responses,
            Self::Native => false,
            Self::Chat => true,
        }
    }
}

/// How many of a model's workers are sent chat completions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChatWorkers {
    #[default]
    None,
    Some,
    All,
}

impl ChatWorkers {
    pub(super) fn of(chat: usize, all: usize) -> Self {
        match chat {
            0 => Self::None,
            count if count < all => Self::Some,
            _ => Self::All,
        }
    }
}
