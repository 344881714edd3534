//! The interface to one engine rank's KV events: numbered batches as they arrive, and replays on request.
//!
//! A source only transports. Order, identity of the engine's process and what to trust are decided by
//! [`super::stream`].

use std::future::Future;

use super::event::Batch;

/// One numbered batch as received. `T` is what it carries.
#[derive(Clone, Debug)]
pub struct SourceBatch<T = Batch> {
    /// The engine's sequence number of this batch; each rank counts its own.
    pub sequence: u64,
    /// Hash of the published bytes (over gRPC: of the events as encoded, without the load report). A
    /// replayed batch has the digest of the original.
    pub digest: u128,
    /// Size on the wire, for memory bounds.
    pub bytes: usize,
    pub batch: Result<T, DecodeError>,
    pub snapshot: Option<SnapshotChunk>,
}

/// One part of a snapshot: a full list of cached blocks for a subscriber that joins late.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotChunk {
    pub index: u32,
    pub count: u32,
    /// Batches that the sender itself missed before the snapshot; above 0 the snapshot is incomplete.
    pub unknown_before: u64,
}

/// A message that does not follow its format.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct DecodeError(pub String);

/// What a source reports. Everything about one connection comes between its `Connected` and its
/// `Disconnected`, however often the source reconnects.
#[derive(Clone, Debug)]
pub enum SourceEvent {
    /// A new connection is established and subscribed.
    Connected {
        /// Identifies the engine's process, if the server sends an identity.
        incarnation: Option<String>,
    },
    /// A batch as the engine published it.
    Live(SourceBatch),
    /// A batch of the response to the last [`Source::replay`]. Sequence numbers rise, but the first may be
    /// later than the requested one.
    Replayed(SourceBatch),
    /// The replay is complete; the batches after it are live.
    ReplayEnd,
    /// The last [`Source::replay`] was refused or broke off.
    ReplayFailed { reason: String },
    /// The connection ended, or connecting failed (reported once for each new reason). The next
    /// connection may reach another process. The source reconnects by itself, with back-off and jitter.
    Disconnected { reason: String },
}

/// A connection to one rank's events, which reconnects by itself.
pub trait Source: Send {
    /// Waits for the next event. Dropping the future loses nothing.
    fn next(&mut self) -> impl Future<Output = SourceEvent> + Send;

    /// Requests all batches from `first` (included) on, and returns at once; the response comes through
    /// [`Source::next`]. A new request replaces one that is still unanswered.
    fn replay(&mut self, first: u64);

    fn can_replay(&self) -> bool;
}
