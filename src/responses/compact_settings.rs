//! How conversations are compacted.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `responses.compact`: what `POST /v1/responses/compact` asks the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// The last message that the model gets, after the conversation.
    pub prompt: String,
    /// The longest summary, in tokens.
    #[schemars(range(min = 16))]
    pub max_output_tokens: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            prompt: "Write a summary of this conversation for whoever continues it without having seen it. State what was asked, \
                     what was done and found, the decisions and their reasons, constraints, names, values and references that \
                     are still needed, and what is left to do. Write only the summary."
                .to_owned(),
            // A few pages: far shorter than what it replaces, and long enough for an agent's session.
            max_output_tokens: 4_096,
        }
    }
}
