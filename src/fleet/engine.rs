//! Which engine a worker runs, as far as the router treats them differently.

use serde::{Deserialize, Serialize};

/// The engine of a worker, as its `/v1/models` says (`owned_by`).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Engine {
    /// vLLM, or an engine that says nothing of itself: it is treated as vLLM.
    #[default]
    Vllm,
    Sglang,
}

impl Engine {
    /// By `owned_by` of an entry of its `/v1/models`.
    pub fn owner(owned_by: &str) -> Self {
        match owned_by {
            "sglang" => Self::Sglang,
            _ => Self::Vllm,
        }
    }

    /// The path of its health check. SGLang's `/health` generates a token, which takes a second when it is idle.
    pub fn health_path(self) -> &'static str {
        match self {
            Self::Vllm => "/health",
            Self::Sglang => "/ready",
        }
    }
}
