//! A connection to one engine rank's events: what it says, and what it can be asked.
//!
//! Sources judge nothing: order, identity and what to believe are for [`super::stream`].

use std::fmt;
use std::future::Future;

use super::event::Batch;

/// One numbered batch as it came.
#[derive(Clone, Debug)]
pub struct Frame {
    /// The engine's own count of batches of this rank.
    pub sequence: u64,
    /// Over the bytes as published (over gRPC: of the events as encoded, without the load). The same
    /// batch asked for again has the same digest.
    pub digest: u128,
    /// Bytes on the wire, for bounds.
    pub bytes: usize,
    /// The batch, or why it cannot be read.
    pub batch: Result<Batch, Undecodable>,
    pub snapshot: Option<Chunk>,
}

/// Part of a full list of what is held, as told to a late joiner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    pub index: u32,
    pub count: u32,
    /// Batches that the teller itself missed before its list began; more than none: not all is listed.
    pub unknown_before: u64,
}

/// Bytes that are not what was agreed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Undecodable(pub String);

impl fmt::Display for Undecodable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a source says. One connection's words come between its `Connected` and its `Lost`, never
/// outside, however often it reconnects.
#[derive(Clone, Debug)]
pub enum Said {
    /// A new connection stands and is subscribed.
    Connected {
        /// Names the engine's process, where the other side can tell.
        epoch: Option<String>,
    },
    /// A batch as it is published.
    Live(Frame),
    /// An answer to the last [`Source::replay`]. Numbers rise, but need not begin where asked.
    Replayed(Frame),
    /// That was all that is kept; from here on it is live.
    ReplayEnd,
    /// The last [`Source::replay`] has no answer, or not all of it.
    ReplayFailed { why: String },
    /// The connection ended, or none could be made (said once for each new reason): nothing that it
    /// said can be continued unproved. The source connects again by itself, with back-off and jitter.
    Lost { why: String },
}

/// A connection to one rank's events, which it keeps open as well as it can.
pub trait Source: Send {
    /// What is said next. Waits while there is nothing; dropping the future loses nothing.
    fn next(&mut self) -> impl Future<Output = Said> + Send;

    /// Asks for all batches from `first` (included) on. Returns at once; the answer is said. A question
    /// before the last one's answer takes its place.
    fn replay(&mut self, first: u64);

    /// Whether there is anything to ask.
    fn can_replay(&self) -> bool;
}
