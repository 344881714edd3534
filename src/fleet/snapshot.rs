//! The fleet at one moment: every worker's status, and for each model the workers that serve it. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use serde_json::value::RawValue;

use super::events::{Endpoint, Events, UnusableSource};
use super::health::Health;
use super::kv_transfer::CompatibilityKey;
use super::worker::{Role, Worker};
use crate::ids::{Model, WorkerId};

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
    /// The first of `models` that is not an adapter. Cached blocks are indexed under this name, even if the
    /// model is served under several names.
    pub base: Option<Model>,
    /// Those of `models` that are LoRA adapters of another model.
    pub adapters: BTreeSet<Model>,
    pub version: Option<String>,
    /// Tokens per KV block.
    pub block_size: Option<u32>,
    /// Whether its prefix cache is on.
    pub prefix_caching: Option<bool>,
    /// Dp rank -> where it publishes KV events, according to the engine; hosts may be `*`.
    pub event_endpoints: BTreeMap<u32, Endpoint>,
    /// Publishers that the engine lists and that cannot be followed.
    pub unusable_events: Vec<UnusableSource>,
}

/// The fleet at one moment.
#[derive(Debug, Default)]
pub struct Snapshot {
    pub workers: Vec<Status>,
    /// Every model that a listed worker serves.
    pub models: BTreeMap<Model, Arc<Group>>,
}

/// The workers that can take a model's next request, or one leg of it.
#[derive(Debug)]
pub struct Group {
    pub model: Model,
    /// Decode workers, then those of role `both`, then prefill workers, so that the workers for a leg are a
    /// range of indices.
    pub workers: Vec<Arc<Worker>>,
    /// The number of workers of role `decode`.
    pub decode_only: usize,
    /// The number of workers of role `prefill`.
    pub prefill_only: usize,
    /// For each of `workers`: decides whether it and another worker are a pair.
    pub compatibility_keys: Vec<CompatibilityKey>,
    /// Worker id -> index in `workers`.
    pub worker_indices: FxHashMap<WorkerId, usize>,
    /// For each of `workers`, how many of its ranks publish KV events.
    pub event_ranks: Vec<u32>,
    /// The model's entry for `/v1/models`, from one of its workers.
    pub card: Box<RawValue>,
    /// Base models of its workers, under which their cached blocks are indexed; nearly always one.
    pub bases: Vec<Model>,
    /// True for a LoRA adapter: its cached blocks are not shared with the base model.
    pub is_adapter: bool,
}

impl Group {
    /// Indices of the workers that take decode legs and whole requests.
    pub fn decode(&self) -> Range<usize> {
        0..self.workers.len() - self.prefill_only
    }

    /// Indices of the workers that take prefill legs.
    pub fn prefill(&self) -> Range<usize> {
        self.decode_only..self.workers.len()
    }
}

impl Status {
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

impl Snapshot {
    /// Groups the workers by model. A model keeps its group, then empty, while all of its workers are down:
    /// requests for it fail as unavailable, not as unknown.
    pub(super) fn new(workers: Vec<Status>, topology: &str) -> Self {
        let mut models: BTreeMap<_, (Group, Vec<&Status>)> = BTreeMap::new();
        for status in &workers {
            for (model, card) in &status.facts.models {
                let (group, members) = models.entry(model.clone()).or_insert_with(|| {
                    let group = Group {
                        model: model.clone(),
                        workers: Vec::new(),
                        decode_only: 0,
                        prefill_only: 0,
                        compatibility_keys: Vec::new(),
                        worker_indices: FxHashMap::default(),
                        event_ranks: Vec::new(),
                        card: card.clone(),
                        bases: Vec::new(),
                        is_adapter: status.facts.adapters.contains(model),
                    };
                    (group, Vec::new())
                });
                if let Some(base) = &status.facts.base
                    && !group.bases.contains(base)
                {
                    group.bases.push(base.clone());
                }
                if status.health == Health::Up && !status.draining {
                    members.push(status);
                }
            }
        }
        let models = models.into_iter().map(|(model, (mut group, mut members))| {
            // A stable sort: workers of one role stay in the order in which they joined.
            members.sort_by_key(|status| match status.worker.role {
                Role::Decode => 0,
                Role::Both => 1,
                Role::Prefill => 2,
            });
            let count = |role| {
                let members = members.iter();
                members.filter(|status| status.worker.role == role).count()
            };
            group.decode_only = count(Role::Decode);
            group.prefill_only = count(Role::Prefill);
            for (worker_index, status) in members.into_iter().enumerate() {
                group.worker_indices.insert(status.worker.id, worker_index);
                group
                    .event_ranks
                    .push(status.event_endpoints().len() as u32);
                group.workers.push(status.worker.clone());
                group
                    .compatibility_keys
                    .push(status.compatibility_key(topology));
            }
            (model, Arc::new(group))
        });
        let models = models.collect();
        Self { workers, models }
    }

    /// True if at least one worker takes whole requests.
    pub fn is_ready(&self) -> bool {
        self.models.values().any(|group| !group.decode().is_empty())
    }

    /// True if a worker was not probed yet, so that its models are unknown.
    pub fn has_unprobed_workers(&self) -> bool {
        self.workers
            .iter()
            .any(|status| status.health == Health::Unknown)
    }

    /// The model of a request that names none: the only one, if there is only one.
    pub fn only_model(&self) -> Option<&Arc<Group>> {
        let mut groups = self.models.values();
        groups.next().filter(|_| groups.next().is_none())
    }
}
