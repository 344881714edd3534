//! What is known of one worker at one moment. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::value::RawValue;

use super::engine::{Capabilities, Engine};
use super::events::{Endpoint, Events, UnusableSource};
use super::health::Health;
use super::kv_transfer::CompatibilityKey;
use super::worker::Worker;
use crate::ids::Model;

/// A worker's status when the snapshot was made.
#[derive(Clone, Debug)]
pub struct Status {
    pub worker: Arc<Worker>,
    pub health: Health,
    /// The engine incarnation. Increases whenever the worker's cache may have been lost: it was down, or its
    /// process restarted.
    pub incarnation: u64,
    pub draining: bool,
    pub facts: Arc<Facts>,
}

/// What the engine reports about itself, except its load.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// Model name -> the engine's entry in `/v1/models`.
    pub models: BTreeMap<Model, Box<RawValue>>,
    /// A hash of what these entries say, without what differs in every response.
    pub entries_hash: u64,
    /// The first of `models` that is not an adapter. Cached blocks are indexed under this name, even if the
    /// model is served under several names.
    pub base: Option<Model>,
    /// The names in `models` that are LoRA adapters of another model.
    pub adapters: BTreeSet<Model>,
    pub engine: Engine,
    pub version: Option<String>,
    /// Tokens of a prompt and its answer that it takes at most.
    pub max_model_len: Option<u32>,
    /// Tokens per KV block.
    pub block_size: Option<u32>,
    pub prefix_caching: Option<bool>,
    /// True if it does not serve the Responses API, or not well enough.
    pub lacks_responses: bool,
    /// True if it does not serve Anthropic's Messages.
    pub lacks_messages: bool,
    /// Dp rank -> where it publishes KV events, according to the engine; hosts may be `*`.
    pub event_endpoints: BTreeMap<u32, Endpoint>,
    /// Dp rank -> where it publishes its load, according to the engine; hosts may be `*`.
    pub load_endpoints: BTreeMap<u32, Endpoint>,
    /// Publishers that the engine lists and that cannot be followed.
    pub unusable_events: Vec<UnusableSource>,
}

impl Facts {
    pub fn capabilities(&self) -> &'static Capabilities {
        self.engine.capabilities()
    }
}

impl Status {
    /// Whether it is sent chat completions in place of requests of the Responses API.
    pub fn speaks_chat_only(&self) -> bool {
        self.worker.responses.is_chat(self.facts.lacks_responses)
    }

    /// Each rank's KV event endpoint, in order of ranks; empty if the worker publishes none.
    pub fn event_endpoints(&self) -> Vec<(u32, Endpoint)> {
        let host = self.worker.host();
        let resolve = |(rank, endpoint): (u32, &Endpoint)| (rank, endpoint.with_host(host));
        match &self.worker.events {
            Events::Off => Vec::new(),
            Events::At(endpoints) => (0..).zip(endpoints).map(resolve).collect(),
            Events::Auto => {
                let reported = self.facts.event_endpoints.iter();
                reported
                    .map(|(rank, endpoint)| resolve((*rank, endpoint)))
                    .collect()
            }
        }
    }

    pub fn event_ranks(&self) -> usize {
        match &self.worker.events {
            Events::Off => 0,
            Events::At(endpoints) => endpoints.len(),
            Events::Auto => self.facts.event_endpoints.len(),
        }
    }

    /// Where each rank publishes its load, in order of ranks; empty if the engine says nothing of it.
    pub fn load_endpoints(&self) -> Vec<(u32, Endpoint)> {
        let host = self.worker.host();
        let reported = self.facts.load_endpoints.iter();
        reported
            .map(|(rank, endpoint)| (*rank, endpoint.with_host(host)))
            .collect()
    }

    /// `topology` is the label that the workers of a pair must share; empty for none.
    pub fn compatibility_key(&self, topology: &str) -> CompatibilityKey {
        let label = self.worker.labels.get(topology);
        CompatibilityKey {
            block_size: self.facts.block_size,
            version: self.facts.version.as_deref().map(Arc::from),
            zone: label.filter(|_| !topology.is_empty()).cloned(),
        }
    }
}
