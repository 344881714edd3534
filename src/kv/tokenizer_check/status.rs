//! The results of tokenizer checks as operators see them: rows of `GET /kv`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::difference::TokenDifference;
use super::types::PromptSource;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    pub model: String,
    pub prompts: PromptSource,
    /// KV events do not count for these prompts, except those of trusted workers.
    pub mismatch: bool,
    pub mismatch_age_s: Option<f64>,
    /// Of the last 128 conclusive checks; 0 to 1.
    pub confirmed_ratio: Option<f64>,
    #[serde(default)]
    pub consecutive_misses: u32,
    /// By outcome.
    #[serde(skip_deserializing)]
    pub checks: BTreeMap<&'static str, u64>,
    /// The first token that differs, if known.
    #[serde(skip_deserializing)]
    pub difference: Option<TokenDifference>,
    #[serde(skip_deserializing)]
    pub workers: Vec<WorkerResults>,
}

/// The checks of one worker for a subject.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerResults {
    pub worker: String,
    /// Its KV events count for these prompts.
    pub is_trusted: bool,
    pub confirmed_ratio: Option<f64>,
    pub consecutive_misses: u32,
}
