//! What a tokenizer check is about, and what it can find.

use serde::{Deserialize, Serialize};

use crate::ids::Model;
use crate::observe::metrics::words;

words! {
    /// Where a prompt's token ids came from.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum PromptSource {
        /// The chat template and the tokenizer.
        Rendered = "rendered",
        /// The tokenizer alone.
        Text = "text",
        /// The client.
        TokenIds = "token_ids",
    }
}

/// Prompts whose tokens either all match the engines' or all do not.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Subject {
    pub model: Model,
    pub source: PromptSource,
}

words! {
    /// The result of one check.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Outcome {
        /// All of the prompt's full blocks are cached.
        Confirmed = "confirmed",
        /// Its first blocks are cached, the others never were.
        Partial = "partial",
        /// None of its blocks is cached.
        Missing = "missing",
        /// The tree was not live all the time, or much of the cache was replaced meanwhile.
        Inconclusive = "inconclusive",
        /// Too many checks were running.
        Skipped = "skipped",
    }
}

impl Outcome {
    /// Whether router and engine agree; `None` if the check says nothing about it.
    pub(super) fn agrees(self) -> Option<bool> {
        match self {
            Outcome::Confirmed => Some(true),
            Outcome::Partial | Outcome::Missing => Some(false),
            Outcome::Inconclusive | Outcome::Skipped => None,
        }
    }
}

#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AlarmChange {
    None,
    Raised,
    Cleared,
}
