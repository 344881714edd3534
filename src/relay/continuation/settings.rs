//! When streams are continued on another worker.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A stream whose worker is lost goes on on another worker, with the tokens that the client has (vLLM's chat
/// completions and completions, and Responses over chat). An empty map (`{}`) turns it on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// How often one stream may go on. Each time, the request gets to one more engine, and it may be what ended the
    /// last one.
    #[schemars(range(min = 1, max = 16))]
    pub max_per_request: u32,
    /// Tokens of prompt and answer that are kept of a stream, at 4 bytes each. A longer one is not continued.
    #[schemars(range(min = 1, max = 4194304))]
    pub max_tokens: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            // A request whose body made two engines cut the connection is refused, too.
            max_per_request: 1,
            // The context of most models; half a megabyte.
            max_tokens: 131_072,
        }
    }
}
