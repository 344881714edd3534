//! The settings of the tokenizer check.

use std::time::Duration;

/// Compares the router's tokens with the engine's: after a request, the blocks of its prompt must be among those
/// that the engine reports. On a tokenizer mismatch the KV events of the model or worker are not used.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// How long after a prompt's first token the engine may take to report its blocks.
    pub grace_period: Duration,
    /// Prompts that are checked at a time; others are not checked. 0 turns the check off.
    pub max_checks: u32,
    /// Tokens of all prompts that are checked at a time.
    pub max_tokens: u64,
    /// Unconfirmed checks in a row that raise the alarm of a tokenizer mismatch.
    pub mismatch_threshold: u32,
    /// After this long in which a worker served requests that must have stored blocks, and no KV event came, its cache is
    /// predicted until the next event.
    pub silence_grace: Duration,
    /// Confirmed checks in a row that end the alarm.
    pub match_threshold: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            grace_period: Duration::from_secs(5),
            // Confirmed within a tenth of a second as a rule, so a sample of 600 a second at 4 us each.
            max_checks: 64,
            max_tokens: 4_000_000,
            // If every second prompt were evicted before it is looked for, one run in a million of checks would
            // be as long.
            mismatch_threshold: 20,
            // Engines report within a scheduler step, or when a request ends. Hours of silence cost a cold cache for each
            // request; a minute costs little.
            silence_grace: Duration::from_secs(60),
            match_threshold: 5,
        }
    }
}
