//! What a session asks for, and its bounds. Pure.

use std::sync::Arc;

use bytes::Bytes;
use smallvec::SmallVec;

use super::client_frame::{Lane, Work};
use super::memory::Remembered;
use super::settings::Settings;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TurnNumber(pub u64);

#[derive(Clone, Debug)]
pub struct Turn {
    pub number: TurnNumber,
    pub lane: Lane,
    pub work: Work,
    /// The response that it continues, if the connection remembers it.
    pub continued: Option<Arc<Remembered>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// The connection's time is over, or it was idle.
    Over,
    /// The router stops.
    Draining,
}

/// What to do, in this order.
#[derive(Clone, Debug)]
pub enum Step {
    Send(Bytes),
    Start(Turn),
    /// Nothing follows.
    Close(CloseReason),
}

pub type Steps = SmallVec<[Step; 2]>;

/// Size of the turns of one connection that wait, together; beyond it they get the error 429.
const MAX_QUEUED_BYTES: u64 = 12 << 20;

/// Size of the turns of one connection that have started and whose bodies `api.max_total_body` does not count yet,
/// together; beyond it the next ones stay in the queue. As much as one message may have by default. A turn that is larger
/// starts alone.
const MAX_STARTING_BYTES: u64 = 16 << 20;

/// Bounds of one connection.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub queued_turns: usize,
    pub queued_bytes: u64,
    pub starting_bytes: u64,
    pub memory_bytes: u64,
    /// For the error of a connection that is too old.
    pub age_minutes: u64,
}

impl Bounds {
    pub fn new(settings: &Settings) -> Self {
        Self {
            queued_turns: settings.max_queued_turns as usize,
            queued_bytes: MAX_QUEUED_BYTES,
            starting_bytes: MAX_STARTING_BYTES,
            memory_bytes: settings.max_memory,
            age_minutes: settings.max_age.as_secs().div_ceil(60),
        }
    }
}

/// What was refused or forgotten for a bound, for counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bitten {
    pub queue: u64,
    pub lanes: u64,
    pub memory: u64,
}
