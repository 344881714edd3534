//! The settings of the tokenizer check.

use std::time::Duration;

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// How long after a prompt's first token its blocks may take to be told.
    pub grace_ms: u64,
    /// Prompts that are being checked at a time, and their tokens together; others are not checked. 0:
    /// none is.
    pub checks_max: u32,
    pub tokens_max: u64,
    /// Checks in a row, not one of them or of those begun since confirmed, until events count no more.
    pub raise_after: u32,
    /// Confirmed checks in a row until they count again.
    pub clear_after: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            // Events come a step after the first token. This outlives a batch that has to be asked for
            // again.
            grace_ms: 5_000,
            // Confirmed within a tenth of a second as a rule, so 2,500 a second at 2 us each; 16 MB.
            checks_max: 256,
            tokens_max: 4_000_000,
            // If every second prompt were evicted before it is looked for, which no cache of use does,
            // one run in a million of checks would be as long.
            raise_after: 20,
            // A template that agrees does so at once; one that differs in a rare case should not flap.
            clear_after: 5,
        }
    }
}

impl Settings {
    pub fn grace(&self) -> Duration {
        Duration::from_millis(self.grace_ms)
    }
}
