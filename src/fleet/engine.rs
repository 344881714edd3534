//! Which engine a worker runs, and what that engine can do, as far as engines differ for the router. Pure.

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

    #[inline]
    pub fn capabilities(self) -> &'static Capabilities {
        match self {
            Self::Vllm => &VLLM,
            Self::Sglang => &SGLANG,
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub struct Capabilities {
    pub health_path: &'static str,
    pub self_description: SelfDescription,
    /// Whether it reports its load at `/v1/loads`, also if its metrics are off.
    pub has_load_page: bool,
    /// Whether the names of LoRA adapters in `/v1/models` are names that a request may have.
    pub serves_adapter_names: bool,
    /// Whether its answers to chat completions are better than those of its own Responses API.
    pub prefers_chat: bool,
    /// Whether it takes the request to abort a request by its id. It notices a closed connection only after seconds, unless the
    /// answer is streamed.
    pub aborts_by_id: bool,
    pub token_ids_field: TokenIdsField,
    /// When it sends a request to the dp rank that the request's header names.
    pub rank_pinning: RankPinning,
    /// Whether it caches pages in a radix tree, each at most once, and names them by their tokens.
    pub caches_pages: bool,
}

/// The page of an engine that names the publishers of its KV events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SelfDescription {
    /// A page for the publishers; the version is at `/version`.
    KvEventSources,
    /// A page for all settings, the version and the sockets of its load among them.
    ServerInfo,
}

impl SelfDescription {
    pub fn path(self) -> &'static str {
        match self {
            Self::KvEventSources => "/kv_event_sources",
            Self::ServerInfo => "/server_info",
        }
    }
}

/// The field of a request from which an engine reads the token ids of the prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenIdsField {
    /// `kv_transfer_params.prompt_token_ids`, of chats and of requests of the Responses API.
    #[default]
    KvTransferParams,
    /// `input_ids`, of chats.
    InputIds,
}

/// When an engine sends a request to the dp rank that the request's header names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankPinning {
    Always,
    /// If it says its version; for the Responses API from this version on. Earlier ones ignore the header there.
    ByVersion {
        responses_since: (u32, u32),
    },
}

/// The health check of engines whose `/health` generates a token, which takes a second when they are idle.
pub const READY_PATH: &str = "/ready";

static VLLM: Capabilities = Capabilities {
    health_path: "/health",
    self_description: SelfDescription::KvEventSources,
    has_load_page: false,
    serves_adapter_names: true,
    prefers_chat: false,
    aborts_by_id: false,
    token_ids_field: TokenIdsField::KvTransferParams,
    rank_pinning: RankPinning::ByVersion {
        responses_since: (0, 33),
    },
    caches_pages: false,
};

static SGLANG: Capabilities = Capabilities {
    health_path: READY_PATH,
    self_description: SelfDescription::ServerInfo,
    has_load_page: true,
    // It answers chats for such a name with the base model: its clients have to write `base:adapter`.
    serves_adapter_names: false,
    prefers_chat: true,
    aborts_by_id: true,
    token_ids_field: TokenIdsField::InputIds,
    rank_pinning: RankPinning::Always,
    caches_pages: true,
};
