//! What operators see of one rank's KV events: the rows of `GET /kv` and of an explanation.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::kv::event::Tier;
use crate::kv::stream::{Counts, State, StateReason};

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    pub worker: String,
    pub rank: u32,
    pub model: String,
    /// `cold`, `partial`, `live` or `stale`; routing uses partial and live trees.
    #[serde(skip_deserializing)]
    pub state: &'static str,
    #[serde(skip_deserializing)]
    pub reason: &'static str,
    pub state_age_s: f64,
    /// Where the tree is from: `engine replay` (all batches from the engine's first on), `engine snapshot`,
    /// `peer NAME` (another replica's tree), or `events` since this router joined.
    pub tree_from: Option<String>,
    pub connected: bool,
    /// Why the last connection ended.
    pub disconnect_reason: Option<String>,
    /// Why the last replay failed; cleared by the next successful one.
    pub replay_error: Option<String>,
    /// Why the last undecodable batch could not be decoded, or what of the last batch that cleared the tree was not
    /// understood.
    pub decode_error: Option<String>,
    /// Identifies the engine's process, if the source sends an identity.
    pub incarnation: Option<String>,
    pub block_size: Option<u32>,
    /// Distinct cached blocks by tier.
    #[serde(skip_deserializing)]
    pub blocks: BTreeMap<&'static str, u64>,
    pub memory_bytes: usize,
    /// Sequence number of the last batch applied.
    pub last_sequence: Option<u64>,
    pub batches: u64,
    pub events: u64,
    /// Over the last ten seconds.
    pub events_per_second: f64,
    pub stored_blocks: u64,
    pub removed_blocks: u64,
    /// Removals of blocks that are not in the tree. Normal for a partial tree, a defect for a live one.
    pub unknown_removals: u64,
    /// From the engine's timestamp of the last live batch until it was applied. It includes the
    /// difference of the two hosts' clocks, so it may be negative.
    pub lag_ms: Option<f64>,
    pub buffered_batches: usize,
    pub buffered_bytes: usize,
    #[serde(flatten)]
    pub counts: Counts,
    /// Times that the tree was cleared, by reason.
    #[serde(skip_deserializing)]
    pub resyncs: BTreeMap<&'static str, u64>,
    /// Events that the tree did not take, by reason.
    #[serde(skip_deserializing)]
    pub ignored_events: BTreeMap<&'static str, u64>,
}

impl Status {
    pub(super) fn new(worker: String, rank: u32, model: String) -> Self {
        Self {
            worker,
            rank,
            model,
            state: State::Cold.as_str(),
            reason: StateReason::Starting.as_str(),
            blocks: Tier::ALL.iter().map(|tier| (tier.as_str(), 0)).collect(),
            ..Self::default()
        }
    }
}

/// The state of one rank's tree, for an explanation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TreeState {
    pub rank: u32,
    pub state: &'static str,
    pub reason: &'static str,
    pub state_age_s: f64,
}
