//! Inputs and outputs of the stream machine.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::observe::metrics::words;

/// How lost KV events are noticed and requested again.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// After this long without an event batch the engine is asked to replay the last one. Only the process that
    /// published it can, so a restarted engine is found, and lost batches at the end come too.
    pub verify_interval: Duration,
    /// A replay that sends nothing for this long has failed. Engines answer between two scheduler steps, and a
    /// step over a long prompt takes a second.
    pub replay_timeout: Duration,
    /// Batches that wait for a replay to end, for each rank. Engines keep 10,000 for replays by default.
    pub max_queued_batches: usize,
    /// Size of the batches that wait, for each rank.
    pub max_queued_size: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            verify_interval: Duration::from_secs(10),
            replay_timeout: Duration::from_secs(3),
            max_queued_batches: 10_000,
            // Some 300,000 tokens in stores; what does not fit is asked for again.
            max_queued_size: 16 << 20,
        }
    }
}

/// What the caller must do, in order. The stream itself has no effects.
#[must_use]
#[derive(Clone, Debug, PartialEq)]
pub enum Step<T> {
    Apply {
        sequence: u64,
        payload: T,
        /// Published just now: neither replayed nor part of a snapshot.
        is_live: bool,
        /// Part of a snapshot, which begins with a clear of its own.
        is_snapshot: bool,
    },
    Clear(ResyncReason),
    RequestReplay {
        first: u64,
    },
    /// Ask another replica for its copy of the tree, then call `on_peer_tree` or `on_no_peer_tree`.
    RequestPeerTree,
    /// Replace the tree by the other replica's.
    TakePeerTree,
}

/// Where another replica's copy of the tree stands in the rank's stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerTree {
    /// The last batch applied to it, and the digest of that batch.
    pub sequence: u64,
    pub digest: u128,
    /// Whether it has all blocks that the engine cached then.
    pub is_complete: bool,
    /// The engine's process, if its source names it.
    pub incarnation: Option<String>,
}

words! {
    /// Why another replica's copy of a tree is not taken.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum PeerTreeRefusal {
        /// All blocks are known by now.
        NotNeeded = "not_needed",
        Disconnected = "disconnected",
        /// Its source names another process of the engine.
        OtherIncarnation = "other_incarnation",
        /// The engine's batch of that number is another one, so the tree is of another process.
        OtherDigest = "other_digest",
        /// Its last batch is not among those that wait here: one of the two replicas is a moment behind the other, so a
        /// copy made a little later can be confirmed.
        NotYetConfirmed = "not_yet_confirmed",
        /// The engine has not shown its batch of that number, and cannot be asked for it.
        Unconfirmed = "unconfirmed",
    }
}

pub type Steps<T> = SmallVec<[Step<T>; 2]>;

words! {
    /// Why the tree is cleared.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum ResyncReason {
        /// Batches are missing and cannot be replayed.
        Gap = "gap",
        /// The connection ended, and the source cannot replay what happened meanwhile.
        Disconnected = "disconnected",
        /// A sequence number went backwards, and the source cannot replay.
        SequenceRegressed = "regressed",
        /// The engine is another process now.
        EngineRestarted = "engine_restarted",
        /// No replay showed in time that the process is the same.
        Unverified = "unverified",
        /// The worker was down or restarted, and the source cannot replay.
        RestartSignal = "restart_signal",
        Undecodable = "undecodable",
        /// Unknown blocks were removed.
        UnknownRemoval = "unknown_removal",
        /// A snapshot follows.
        Snapshot = "snapshot",
        /// The engine did not confirm the tree that another replica gave.
        PeerTree = "peer_tree",
    }
}

impl ResyncReason {
    /// Whether the engine may have restarted, and so lost its cache.
    pub fn suspects_restart(self) -> bool {
        match self {
            ResyncReason::Gap
            | ResyncReason::Undecodable
            | ResyncReason::UnknownRemoval
            | ResyncReason::Snapshot
            | ResyncReason::PeerTree => false,
            ResyncReason::Disconnected
            | ResyncReason::SequenceRegressed
            | ResyncReason::EngineRestarted
            | ResyncReason::Unverified
            | ResyncReason::RestartSignal => true,
        }
    }
}

words! {
    /// Why the process is being verified.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum SuspectReason {
        /// Batches are missing; nothing indicates a restart.
        Gap = "gap",
        /// No batch for a while. Most likely the engine is idle.
        Silence = "silence",
        /// The connection is new but names the same process; batches may be missing.
        SameIncarnation = "same_incarnation",
        /// The connection is new.
        Reconnected = "reconnected",
        /// A sequence number went backwards.
        SequenceRegressed = "regressed",
        /// The health checks saw the worker go down or restart.
        RestartSignal = "restart_signal",
        /// The tree is another replica's.
        PeerTree = "peer_tree",
    }
}

impl SuspectReason {
    /// Whether the tree may belong to a process that is gone, so that routing must not use it.
    pub fn suspects_restart(self) -> bool {
        match self {
            SuspectReason::Gap | SuspectReason::Silence | SuspectReason::SameIncarnation => false,
            SuspectReason::Reconnected
            | SuspectReason::SequenceRegressed
            | SuspectReason::RestartSignal
            | SuspectReason::PeerTree => true,
        }
    }
}

/// How far the tree can be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The tree is empty.
    Cold,
    /// The blocks in the tree are cached, but others may be cached too.
    Partial,
    /// Exactly the blocks in the tree are cached.
    Live,
    /// The process may have restarted since.
    Stale { since: Instant },
}

impl State {
    pub fn counts_in_routing(self) -> bool {
        matches!(self, State::Partial | State::Live)
    }

    pub fn as_str(self) -> &'static str {
        match self {
            State::Cold => "cold",
            State::Partial => "partial",
            State::Live => "live",
            State::Stale { .. } => "stale",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateReason {
    /// Nothing was received yet.
    Starting,
    /// All batches are known, from the process's first one on.
    FullReplay,
    /// The engine no longer keeps the earlier batches.
    HistoryTruncated,
    Snapshot,
    /// Another replica's tree, which the engine confirmed.
    PeerTree,
    /// The snapshot says that it is incomplete, or its last chunk is missing.
    PartialSnapshot,
    /// Some blocks could not be added to the tree, or the index evicted them.
    Incomplete,
    /// The engine cleared its cache, and all blocks since are known.
    EngineCleared,
    Disconnected,
    Suspect(SuspectReason),
    Resync(ResyncReason),
}

impl StateReason {
    pub fn as_str(self) -> &'static str {
        match self {
            StateReason::Starting => "starting",
            StateReason::FullReplay => "full_replay",
            StateReason::HistoryTruncated => "history_truncated",
            StateReason::Snapshot => "snapshot",
            StateReason::PeerTree => "peer_tree",
            StateReason::PartialSnapshot => "partial_snapshot",
            StateReason::Incomplete => "incomplete",
            StateReason::EngineCleared => "engine_cleared",
            StateReason::Disconnected => "disconnected",
            StateReason::Suspect(suspicion) => suspicion.as_str(),
            StateReason::Resync(reason) => reason.as_str(),
        }
    }
}

/// Counters since the stream began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counts {
    /// Gaps in the sequence numbers.
    pub gaps: u64,
    pub duplicates: u64,
    /// Replay requests of any kind.
    pub replays_requested: u64,
    /// Of those, requests for the rest of a response that broke off or had holes.
    pub replays_continued: u64,
    pub verifications_started: u64,
    pub verifications_passed: u64,
    pub verifications_failed: u64,
    /// Batches that did not fit into the buffer; they are requested again.
    pub dropped_batches: u64,
    /// Replayed batches without a request, and batches outside of a connection.
    pub unexpected_batches: u64,
    /// Other replicas' trees that were taken over, whether or not the engine confirmed them.
    pub peer_trees: u64,
    /// Times that live batches and a replay were of different processes.
    pub identity_conflicts: u64,
}
