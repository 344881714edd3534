//! The workers: who they are, whether they are well, how busy they are, what they serve.
//!
//! Routing reads a [`Snapshot`], which never changes; whatever changes makes a new one. Only load
//! numbers and the breaker's state, which change with every request, are atomics inside.

pub mod breaker;
pub mod discovery;
pub mod events;
pub mod handoff;
pub mod health;
pub mod load;
pub mod probe;
pub mod registry;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use arc_swap::ArcSwapOption;
use hyper::header::HeaderValue;
use rustc_hash::FxHashMap;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use self::events::{Endpoint, Events};
use self::handoff::{Peer, Shape};
use self::health::Health;
use self::load::Load;
use crate::http::circuit_breaker::SharedBreaker;
use crate::http::client;
use crate::ids::{Model, WorkerId};

/// Which part of a request a worker computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Prompts only; a decode worker fetches the KV blocks.
    Prefill,
    /// Generates from KV blocks of a prefill worker; takes whole requests too.
    Decode,
    /// Everything.
    #[default]
    Both,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Both => "both",
        })
    }
}

/// A worker as some discovery lists it.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    /// Unique in the fleet; the address where nothing better is known.
    pub name: String,
    /// `host:port`.
    pub address: String,
    pub role: Role,
    /// Gets nothing new.
    pub draining: bool,
    /// What the worker is sent as `authorization`, if it wants a key.
    pub authorization: Option<HeaderValue>,
    pub events: Events,
    /// What an operator says of it, as where it stands.
    pub labels: BTreeMap<String, Arc<str>>,
    /// `http://host:port` of its bootstrap server, where that is not at its own host and the usual port.
    pub bootstrap: Option<Arc<str>>,
}

/// One worker for as long as it is listed.
#[derive(Debug)]
pub struct Worker {
    pub id: WorkerId,
    pub name: Arc<str>,
    pub role: Role,
    pub authorization: Option<HeaderValue>,
    pub events: Events,
    pub labels: BTreeMap<String, Arc<str>>,
    pub bootstrap: Option<Arc<str>>,
    pub pool: Arc<client::Pool>,
    pub load: Load,
    pub breaker: SharedBreaker,
    /// Open after several KV transfers from this prefill worker failed in a row. Its engine may be healthy; it
    /// only gets no prefill legs for a while.
    pub kv_transfer_breaker: SharedBreaker,
    /// Tokens that its prefix cache holds; 0 where it does not say.
    pub cache_tokens: AtomicU64,
    /// It does not take requests that ask it to tell again what it holds.
    pub refuses_reports: AtomicBool,
    /// Where its blocks are fetched, as its process told; nothing while it may be another one.
    pub peer: ArcSwapOption<Peer>,
}

/// What was known of a worker when the snapshot was made.
#[derive(Clone, Debug)]
pub struct Status {
    pub worker: Arc<Worker>,
    pub health: Health,
    /// Grows whenever what the worker held may be gone: it was down, or its process is a new one.
    pub life: u64,
    pub draining: bool,
    pub facts: Arc<Facts>,
}

/// What a worker tells of itself, beside its load.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// Model name -> the worker's own entry of `/v1/models`.
    pub models: BTreeMap<Model, Box<RawValue>>,
    /// The first of `models` that is no adapter: the name for what its cached blocks belong to, also
    /// where it is served under several.
    pub base: Option<Model>,
    /// Those of `models` that are adapters of another.
    pub adapters: BTreeSet<Model>,
    pub version: Option<String>,
    /// Tokens of a cached block.
    pub block_size: Option<u32>,
    /// Rank -> where it says that it publishes its cache events; hosts may be `*`.
    pub event_endpoints: BTreeMap<u32, Endpoint>,
}

/// The fleet at one moment.
#[derive(Debug, Default)]
pub struct Snapshot {
    pub workers: Vec<Status>,
    /// Every model that some listed worker serves.
    pub models: BTreeMap<Model, Arc<Group>>,
}

/// The workers that may take a model's next request, or a part of it.
#[derive(Debug)]
pub struct Group {
    pub model: Model,
    /// Those that decode only, then those of both roles, then those that prefill only: who does what is a
    /// range of places.
    pub workers: Vec<Arc<Worker>>,
    /// How many only decode.
    pub decode_only: usize,
    /// How many only prefill.
    pub prefill_only: usize,
    /// For each of `workers`, what decides whether it fits another one of a pair.
    pub shapes: Vec<Shape>,
    /// Places in `workers`.
    pub place: FxHashMap<WorkerId, usize>,
    /// For each of `workers`, how many of its ranks tell their cache events; 0 for a worker that does not.
    pub event_ranks: Vec<u32>,
    /// The model's entry for `/v1/models`, as one of its workers gave it.
    pub card: Box<RawValue>,
    /// Its workers' base models, under which their cached blocks are known; nearly always one.
    pub bases: Vec<Model>,
    /// Whether it is an adapter, whose blocks are its own.
    pub is_adapter: bool,
}

impl Group {
    /// Places of the workers that take whole requests, and continue what others began.
    pub fn decode(&self) -> Range<usize> {
        0..self.workers.len() - self.prefill_only
    }

    /// Places of the workers that compute prompts for others.
    pub fn prefill(&self) -> Range<usize> {
        self.decode_only..self.workers.len()
    }
}

impl Status {
    /// Where each rank's cache events are to be had, in order of ranks; empty for nowhere.
    pub fn event_endpoints(&self) -> Vec<(u32, Endpoint)> {
        let address = self.worker.pool.address();
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let at = |(rank, endpoint): (u32, &Endpoint)| (rank, endpoint.at(host));
        match &self.worker.events {
            Events::Off => Vec::new(),
            Events::At(endpoints) => (0..).zip(endpoints).map(at).collect(),
            Events::Auto => {
                let told = self.facts.event_endpoints.iter();
                told.map(|(rank, endpoint)| at((*rank, endpoint))).collect()
            }
        }
    }
}

impl Snapshot {
    /// Whether some worker can take some request.
    pub fn is_ready(&self) -> bool {
        self.models.values().any(|group| !group.decode().is_empty())
    }

    /// Whether some worker was not asked yet what it serves.
    pub fn is_being_learnt(&self) -> bool {
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
