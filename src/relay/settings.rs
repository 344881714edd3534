//! The settings of retries and time-outs.

use serde::{Deserialize, Serialize};

/// Limits of one request's way to an engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// Workers that one request may try.
    pub attempts_max: u32,
    /// Statuses of an engine that send a request elsewhere. Not 500: a request that breaks one
    /// engine would break the next.
    pub retry_statuses: Vec<u16>,
    /// Before the second try; doubles with each further one.
    pub backoff_ms: u64,
    pub backoff_max_ms: u64,
    /// Retries allowed for each 100 requests.
    pub retry_budget_percent: u32,
    /// Retries a second that are always allowed.
    pub retry_budget_min_per_s: u32,
    /// Streamed requests: from sending to the first byte of the answer's body.
    pub first_byte_timeout_ms: u64,
    /// Other requests: from sending to the answer. Longer than the longest answer: one that is still
    /// being made when it ends is asked for again elsewhere.
    pub answer_timeout_ms: u64,
    /// Between two pieces of an answer. An engine that shuts down can leave a stream open for ever.
    pub stream_idle_timeout_ms: u64,
    /// From the first try to the end of the answer.
    pub request_timeout_ms: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            attempts_max: 3,
            retry_statuses: vec![502, 503, 504],
            backoff_ms: 25,
            backoff_max_ms: 1_000,
            retry_budget_percent: 20,
            retry_budget_min_per_s: 10,
            // Longer than any queue that anyone waits in.
            first_byte_timeout_ms: 120_000,
            // The time-out of OpenAI's own clients.
            answer_timeout_ms: 600_000,
            stream_idle_timeout_ms: 60_000,
            request_timeout_ms: 1_800_000,
        }
    }
}
