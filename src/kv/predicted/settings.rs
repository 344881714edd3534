//! The settings of the predicted index.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Prediction of what workers have cached from the prompts that this router sent them: for workers without KV
/// events and prompts without token ids.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Bytes of text that make a token, on average.
    #[schemars(range(min = 0.01))]
    pub bytes_per_token: f64,
    /// Tokens that fit into a worker's prefix cache, for engines whose metrics do not say. 400,000 is about what
    /// an 80 GB GPU has left beside an 8B model.
    #[schemars(range(min = 1))]
    pub tokens_per_worker: u64,
    /// Length of a prompt's first blocks as text. 64 bytes are about 16 tokens of English, the usual block of an
    /// engine.
    #[serde(skip)]
    pub block_size: u32,
    /// A prompt that was not sent again for this long no longer counts as cached.
    #[serde(skip)]
    pub max_age: Duration,
    /// Blocks of all workers, about 120 bytes each: 240 MB, or 2,000 long conversations on each of 10 workers.
    #[serde(skip)]
    pub max_blocks: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            bytes_per_token: 4.0,
            tokens_per_worker: 400_000,
            block_size: 64,
            // Engines of a quiet fleet keep a prefix for longer, those of a busy one evict it sooner.
            max_age: Duration::from_secs(3_600),
            max_blocks: 2_000_000,
        }
    }
}
