//! How much the memory store may keep.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::SizeText;

/// Responses and conversations in the memory of this process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Responses and conversations together. When this or `max_size` is reached, the one that was not used for
    /// the longest time is dropped; running ones never, which get half of the room at most.
    #[schemars(range(min = 2))]
    pub max_records: u64,
    /// Size of all responses and conversations, with about 400 bytes each for keeping them. A turn of a chat has
    /// some 10 KB: 1 GiB keeps the last 100,000.
    #[serde(with = "SizeText")]
    #[schemars(extend("min" = "1MiB"))]
    pub max_size: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_records: 1_000_000,
            max_size: 1 << 30,
        }
    }
}
