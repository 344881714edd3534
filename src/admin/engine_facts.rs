//! What an engine reports about its cache and its KV events, as part of a worker's row of `GET /fleet`.

use serde::{Deserialize, Serialize};

use crate::fleet::engine::Engine;
use crate::fleet::events::{Endpoint, Events};
use crate::fleet::health::Health;
use crate::fleet::{ResponsesApi, Status};

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct EngineRow {
    /// An engine that says nothing of itself is treated as vLLM.
    pub engine: Engine,
    pub block_size: Option<u32>,
    /// Whether its prefix cache is on, if it says so.
    pub prefix_caching: Option<bool>,
    /// How it is sent requests of the Responses API: `native` or `chat`.
    pub responses: ResponsesApi,
    pub events: EventsRow,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct EventsRow {
    /// Ranks whose KV events are followed.
    pub ranks: usize,
    /// Ranks whose KV events are followed, but whose lost batches cannot be asked for again.
    pub without_replay: usize,
    /// Publishers that cannot be followed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unusable: Vec<UnusableRow>,
    /// Why no rank's KV events are followed, and what to change.
    #[serde(skip_serializing_if = "Option::is_none")]
    none_because: Option<String>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct UnusableRow {
    pub rank: String,
    pub endpoint: String,
    pub reason: String,
    pub fix: String,
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
            responses: if status.speaks_chat_only() {
                ResponsesApi::Chat
            } else {
                ResponsesApi::Native
            },
            events: EventsRow {
                none_because: endpoints.is_empty().then(|| why_none(status)),
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

/// Why a worker without an endpoint of KV events has none.
fn why_none(status: &Status) -> String {
    let facts = &status.facts;
    if status.worker.events == Events::Off {
        return "the worker's configuration turns them off (events: {from: off})".to_owned();
    }
    if let Some(source) = facts.unusable_events.first() {
        return format!("{}; {}", source.reason, source.fix());
    }
    if facts.prefix_caching == Some(false) {
        return "the engine's prefix cache is off".to_owned();
    }
    if facts.models.is_empty() {
        return match status.health {
            Health::Down => "the worker is down and has not said where it publishes them",
            Health::Up | Health::Unknown => "the worker has not said yet where it publishes them",
        }
        .to_owned();
    }
    let page = facts.capabilities().self_description.path();
    format!(
        "the engine names no publisher at {page}; start it with --kv-events-config, or set `events` of the worker"
    )
}
