//! What operators see of one rank's KV events: the rows of `GET /kv` and of an explanation.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::kv::event::Tier;
use crate::kv::stream::{Counts, State, StateReason};

/// One rank of one worker.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    pub worker: String,
    pub rank: u32,
    pub model: String,
    /// `cold`, `partial`, `live` or `stale`; routing uses partial and live trees.
    pub state: &'static str,
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
    /// Why the last undecodable batch could not be decoded.
    pub decode_error: Option<String>,
    /// Identifies the engine's process, if the source sends an identity.
    pub incarnation: Option<String>,
    pub block_size: Option<u32>,
    /// Distinct cached blocks by tier.
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
    pub resyncs: BTreeMap<&'static str, u64>,
    /// Events that the tree did not take, by reason.
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
            state_age_s: 0.0,
            tree_from: None,
            connected: false,
            disconnect_reason: None,
            replay_error: None,
            decode_error: None,
            incarnation: None,
            block_size: None,
            blocks: Tier::ALL.iter().map(|tier| (tier.as_str(), 0)).collect(),
            memory_bytes: 0,
            last_sequence: None,
            batches: 0,
            events: 0,
            events_per_second: 0.0,
            stored_blocks: 0,
            removed_blocks: 0,
            unknown_removals: 0,
            lag_ms: None,
            buffered_batches: 0,
            buffered_bytes: 0,
            counts: Counts::default(),
            resyncs: BTreeMap::new(),
            ignored_events: BTreeMap::new(),
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
