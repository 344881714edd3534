//! What a tokenizer check is about, and what it can find.

use serde::{Deserialize, Serialize};

use crate::ids::Model;

/// Where a prompt's token ids came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptSource {
    /// The chat template and the tokenizer.
    Rendered,
    /// The tokenizer alone.
    Text,
    /// The client.
    TokenIds,
}

impl PromptSource {
    pub fn as_str(self) -> &'static str {
        match self {
            PromptSource::Rendered => "rendered",
            PromptSource::Text => "text",
            PromptSource::TokenIds => "token_ids",
        }
    }
}

/// Prompts whose tokens either all match the engines' or all do not.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Subject {
    pub model: Model,
    pub source: PromptSource,
}

/// The result of one check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// All of the prompt's full blocks are cached.
    Confirmed,
    /// Its first blocks are cached, the others never were.
    Partial,
    /// None of its blocks is cached.
    Missing,
    /// The tree was not live all the time, or much of the cache was replaced meanwhile.
    Inconclusive,
    /// Too many checks were running.
    Skipped,
}

impl Outcome {
    pub const ALL: [Outcome; 5] = [
        Outcome::Confirmed,
        Outcome::Partial,
        Outcome::Missing,
        Outcome::Inconclusive,
        Outcome::Skipped,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Outcome::Confirmed => "confirmed",
            Outcome::Partial => "partial",
            Outcome::Missing => "missing",
            Outcome::Inconclusive => "inconclusive",
            Outcome::Skipped => "skipped",
        }
    }

    /// Whether router and engine agree; `None` if the check says nothing about it.
    pub(super) fn agrees(self) -> Option<bool> {
        match self {
            Outcome::Confirmed => Some(true),
            Outcome::Partial | Outcome::Missing => Some(false),
            Outcome::Inconclusive | Outcome::Skipped => None,
        }
    }
}

/// How a check changed an alarm.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AlarmChange {
    None,
    Raised,
    Cleared,
}
