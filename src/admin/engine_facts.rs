//! What an engine reports about its cache and its KV events, as part of a worker's row of `GET /fleet`.

use serde::Serialize;

use crate::fleet::engine::Engine;
use crate::fleet::events::Endpoint;
use crate::fleet::{ResponsesApi, Status};

#[derive(Debug, Serialize)]
pub(super) struct EngineRow {
    /// An engine that says nothing of itself is treated as vLLM.
    engine: Engine,
    block_size: Option<u32>,
    /// Whether its prefix cache is on, if it says so.
    prefix_caching: Option<bool>,
    /// How it is sent requests of the Responses API: `native` or `chat`.
    responses: ResponsesApi,
    events: EventsRow,
}

#[derive(Debug, Serialize)]
struct EventsRow {
    /// Ranks whose KV events are followed.
    ranks: usize,
    /// Those of them whose lost batches cannot be asked for again.
    without_replay: usize,
    /// Publishers that cannot be followed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    unusable: Vec<UnusableRow>,
}

#[derive(Debug, Serialize)]
struct UnusableRow {
    rank: String,
    endpoint: String,
    reason: String,
    fix: String,
}

impl EngineRow {
    pub(super) fn of(status: &Status) -> Self {
        let endpoints = status.event_endpoints();
        let has_none = |(_, endpoint): &&(u32, Endpoint)| {
            matches!(endpoint, Endpoint::Zmq { replay: None, .. })
        };
        let unusable = status.facts.unusable_events.iter();
        Self {
            engine: status.facts.engine,
            block_size: status.facts.block_size,
            prefix_caching: status.facts.prefix_caching,
            responses: match status.speaks_chat_only() {
                true => ResponsesApi::Chat,
                false => ResponsesApi::Native,
            },
            events: EventsRow {
                ranks: endpoints.len(),
                without_replay: endpoints.iter().filter(has_none).count(),
                unusable: unusable
                    .map(|source| UnusableRow {
                        rank: source.rank.clone(),
                        endpoint: source.endpoint.clone(),
                        reason: source.reason.clone(),
                        fix: source.fix(),
                    })
                    .collect(),
            },
        }
    }
}
