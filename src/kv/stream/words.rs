//! What goes into the stream machine and what comes out of it.

use std::time::Instant;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::kv::event::Batch;
use crate::kv::source::{Chunk, Frame};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// After so long without a batch, the source is asked whether the process is still the same.
    pub silence_ms: u64,
    /// How long a question may stay without any (further) answer.
    pub replay_timeout_ms: u64,
    /// Batches of one rank that wait for a replay to end.
    pub held_batches_max: usize,
    /// The same, in bytes as they came.
    pub held_bytes_max: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            // A tail of lost batches is noticed within this; a question costs the engine one batch.
            silence_ms: 10_000,
            // Engines answer between two scheduler steps, and a step over a long prompt takes a second.
            replay_timeout_ms: 3_000,
            // As many as engines keep for replays by default.
            held_batches_max: 10_000,
            // Some 300,000 tokens in stores; what does not fit is asked for again.
            held_bytes_max: 16 << 20,
        }
    }
}

/// A numbered batch of one rank, whatever it carries.
#[derive(Clone, Debug)]
pub struct Numbered<T> {
    pub sequence: u64,
    pub digest: u128,
    pub bytes: usize,
    pub snapshot: Option<Chunk>,
    /// None where the bytes cannot be read.
    pub carried: Option<T>,
}

impl From<Frame> for Numbered<Batch> {
    fn from(frame: Frame) -> Self {
        Self {
            sequence: frame.sequence,
            digest: frame.digest,
            bytes: frame.bytes,
            snapshot: frame.snapshot,
            carried: frame.batch.ok(),
        }
    }
}

/// What the driver must do, in order. The stream itself does nothing.
#[must_use]
#[derive(Clone, Debug, PartialEq)]
pub enum Step<T> {
    Apply {
        sequence: u64,
        carried: T,
        /// Told as it happened: not asked for afterwards, and no part of a full list.
        is_live: bool,
    },
    /// Forget all that was applied.
    Clear(Reset),
    AskReplay {
        first: u64,
    },
}

pub type Steps<T> = SmallVec<[Step<T>; 2]>;

/// Why all that was known of a cache is forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reset {
    /// Batches are missing and cannot be had.
    Gap,
    /// The connection ended, and the source cannot be asked what happened meanwhile.
    Disconnected,
    /// Numbers ran backwards, and the source cannot be asked.
    Backwards,
    /// Another process answers now.
    Restarted,
    /// Nobody showed in time that it is the same process.
    Unproved,
    /// The worker was down or its process is new, and the source cannot be asked.
    Witness,
    Undecodable,
    /// Something was removed, and it cannot be known what.
    UnknownRemoval,
    /// A full list follows.
    Snapshot,
}

impl Reset {
    pub const ALL: [Reset; 9] = [
        Reset::Gap,
        Reset::Disconnected,
        Reset::Backwards,
        Reset::Restarted,
        Reset::Unproved,
        Reset::Witness,
        Reset::Undecodable,
        Reset::UnknownRemoval,
        Reset::Snapshot,
    ];

    /// Whether another process may have taken the place of the one that was known.
    pub fn is_of_the_process(self) -> bool {
        match self {
            Reset::Gap | Reset::Undecodable | Reset::UnknownRemoval | Reset::Snapshot => false,
            Reset::Disconnected
            | Reset::Backwards
            | Reset::Restarted
            | Reset::Unproved
            | Reset::Witness => true,
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Reset::Gap => "gap",
            Reset::Disconnected => "disconnected",
            Reset::Backwards => "backwards",
            Reset::Restarted => "restarted",
            Reset::Unproved => "unproved",
            Reset::Witness => "witness",
            Reset::Undecodable => "undecodable",
            Reset::UnknownRemoval => "unknown_removal",
            Reset::Snapshot => "snapshot",
        }
    }
}

/// Why the source is asked whether its process is the one that was known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doubt {
    /// Batches are missing; nothing speaks against the process.
    Gap,
    /// Nothing was heard for long. Most likely the engine is idle.
    Silence,
    /// The connection is new, but names the same process; batches may be missing.
    SameEpoch,
    /// The connection is new.
    Reconnected,
    /// A number ran backwards.
    Backwards,
    /// Someone else saw the worker go down, or its process begin.
    Witness,
}

impl Doubt {
    /// Whether what is known may be of a process that is gone, so that nothing may rely on it.
    pub fn is_of_the_process(self) -> bool {
        match self {
            Doubt::Gap | Doubt::Silence | Doubt::SameEpoch => false,
            Doubt::Reconnected | Doubt::Backwards | Doubt::Witness => true,
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Doubt::Gap => "gap",
            Doubt::Silence => "silence",
            Doubt::SameEpoch => "same_epoch",
            Doubt::Reconnected => "reconnected",
            Doubt::Backwards => "backwards",
            Doubt::Witness => "witness",
        }
    }
}

/// How far what is known can be relied on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Nothing is known.
    Cold,
    /// What is known is held, but more may be held than is known.
    Partial,
    /// All that is held is known.
    Live,
    /// It was known; whether the process is still the same is not.
    Stale { since: Instant },
}

impl State {
    pub fn scores(self) -> bool {
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

/// Why the state is what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Nothing was heard yet.
    Starting,
    /// All is known from the process's first batch on.
    FromTheFirst,
    /// The earlier batches are no longer kept.
    BeganLate,
    Snapshot,
    /// The list lacked something, or has not ended.
    SnapshotPart,
    /// Something stored could not be placed, or was taken by a memory bound.
    Incomplete,
    Disconnected,
    Doubt(Doubt),
    Reset(Reset),
}

impl Reason {
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::Starting => "starting",
            Reason::FromTheFirst => "from_the_first",
            Reason::BeganLate => "began_late",
            Reason::Snapshot => "snapshot",
            Reason::SnapshotPart => "snapshot_part",
            Reason::Incomplete => "incomplete",
            Reason::Disconnected => "disconnected",
            Reason::Doubt(doubt) => doubt.as_str(),
            Reason::Reset(reset) => reset.as_str(),
        }
    }
}

/// What happened so far; all of it only rises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Times that batches were missing.
    pub gaps: u64,
    pub duplicates: u64,
    /// Questions to the source, of any kind.
    pub asked: u64,
    pub proofs_asked: u64,
    pub proofs_kept: u64,
    pub proofs_failed: u64,
    /// Batches that came while too many were waiting; they are asked for again.
    pub held_dropped: u64,
    /// Answers to no question, and batches outside of a connection.
    pub stray: u64,
    /// Times that the live batches and an answer were of different processes.
    pub contradictions: u64,
}
