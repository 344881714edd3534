//! A stored response, and the arguments and outcomes of the operations on it.

use std::sync::Arc;

use bytes::Bytes;

use super::conversation::{Commit, CommitRefusal};
pub use super::keys::IdempotencyToken;
use super::ownership::{FencingToken, Owner};
use super::status::Status;
use crate::ids::{Model, ResponseId};

/// Where the response was computed: routes a continuation to the same worker if its KV cache is not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutingHint {
    pub model: Model,
    /// Name of the worker that computed it last.
    pub worker: Option<Arc<str>>,
}

/// How long a record is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retention {
    /// `store: true`: kept for the retention of responses.
    Stored,
    /// `background` with `store: false`: kept for polling only, for some minutes after its end. Cannot be
    /// continued, and its input cannot be listed.
    Ephemeral,
}

/// The result of a response, as JSON that the store does not interpret.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content {
    /// The Response object without its `output`.
    pub response: Bytes,
    /// JSON array of output items.
    pub output: Bytes,
}

impl Content {
    pub(super) fn size(&self) -> usize {
        self.response.len() + self.output.len()
    }
}

/// A response and everything that it continues, as [`History`](super::history::History) returned it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Oldest first; the last is the response that is continued.
    pub ids: Arc<[ResponseId]>,
    /// Size of all input and output items together.
    pub bytes: u64,
}

#[derive(Clone, Debug)]
pub struct NewRecord {
    pub token: IdempotencyToken,
    /// The chain that it continues. All of its ids have this response's root.
    pub parent: Option<Chain>,
    pub hint: RoutingHint,
    /// JSON array of this request's own input items.
    pub input: Bytes,
    /// The content of a finished response; or what clients see while it runs.
    pub content: Content,
    pub initial: InitialState,
}

impl NewRecord {
    /// Bytes of its values.
    pub(super) fn size(&self) -> usize {
        let request = match &self.initial {
            InitialState::Finished { .. } => 0,
            InitialState::Background { request, .. } => request.len(),
        };
        self.input.len() + self.content.size() + request
    }
}

/// The state in which a record is created.
#[derive(Clone, Debug)]
pub enum InitialState {
    /// A foreground response, stored after its end.
    Finished { status: Status },
    /// A background response, stored before it starts.
    Background {
        fence: FencingToken,
        retention: Retention,
        /// Requested with `stream: true`.
        streams: bool,
        /// What a new owner needs to run it again. Dropped at its end.
        request: Bytes,
    },
}

#[derive(Clone, Debug)]
pub struct Record {
    pub status: Status,
    pub hint: RoutingHint,
    /// The response it continues.
    pub previous: Option<ResponseId>,
    /// As last written; while the response runs, as it was created.
    pub content: Content,
    /// `None` for a foreground response.
    pub background: Option<Background>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Background {
    /// Who runs it, or ran it. `None` between a release and a takeover.
    pub owner: Option<Owner>,
    pub fencing_number: u64,
    /// How often it was started, including this run.
    pub attempts: u32,
    pub retention: Retention,
    pub streams: bool,
    /// The number of the last event in the log.
    pub last_event: Option<u64>,
}

/// Consecutive events, encoded by the caller. The store interprets only their numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventBatch {
    /// The numbers of the first and the last event. The first event of a response is 0.
    pub first: u64,
    pub last: u64,
    pub bytes: Bytes,
    /// Token ids of the text in these events, for a replica that goes on with the response. No reader gets them. Empty
    /// if the caller keeps none.
    pub tokens: Bytes,
}

impl EventBatch {
    /// Without token ids.
    pub fn new(first: u64, last: u64, bytes: impl Into<Bytes>) -> Self {
        Self {
            first,
            last,
            bytes: bytes.into(),
            tokens: Bytes::new(),
        }
    }

    /// What it counts in the bound of a log.
    pub fn size(&self) -> u64 {
        (self.bytes.len() + self.tokens.len()) as u64
    }
}

#[derive(Clone, Debug)]
pub struct Finalization {
    pub token: IdempotencyToken,
    /// Terminal, and not `Cancelled`: only a cancel sets that.
    pub status: Status,
    pub content: Content,
    pub hint: RoutingHint,
    /// `Stored`: as it was created. `Ephemeral`: kept for polling only, because something that it continues was deleted.
    pub retention: Retention,
    /// The last events, with the terminal one.
    pub batch: Option<EventBatch>,
    /// Where each delta event ends in the final output, so that the events can be reproduced after the log has
    /// expired. The store does not interpret it.
    pub delta_table: Bytes,
    /// Added to its conversation in the same write. If the conversation does not accept the items, nothing is written.
    pub commit: Option<Commit>,
}

#[derive(Clone, Debug)]
pub struct Cancellation {
    pub token: IdempotencyToken,
    /// The Response object with status `cancelled`, without `output`.
    pub response: Bytes,
    /// The terminal event. The store gives it the next number, so it must not contain one.
    pub event: Bytes,
}

/// The partial output of a cancelled response, which only its owner knows.
#[derive(Clone, Debug)]
pub struct CancelledOutput {
    pub content: Content,
    pub delta_table: Bytes,
}

/// Outcome of a conditional write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum WriteOutcome {
    /// Applied now, or before by a write with the same token.
    Done,
    /// There is no such response (any more). Its owner stops running it.
    Gone,
    /// The fencing token is outdated: another owner has the response. The caller stops running it.
    Fenced,
    /// The response has ended, with this status.
    Terminal(Status),
    /// The log contains these events already; it ends at this number.
    Duplicate { last: u64 },
    /// Events before these are missing: the log ends at this number. The owner must append from there.
    Gap { last: Option<u64> },
    /// The log is full. The response may continue; its events are no longer stored.
    Overflow,
    /// Only of a finalize: its conversation does not accept the items, so the response has not ended.
    NotAdded(CommitRefusal),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum CancelOutcome {
    /// Cancelled now. The owner, if any, was sent a notice.
    Done {
        was: Status,
        owner: Option<Owner>,
    },
    /// It had ended before, with this status.
    Terminal(Status),
    /// Foreground responses cannot be cancelled.
    NotBackground,
    Gone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum DeleteOutcome {
    /// The owner, if the response was running, was sent a notice.
    Done {
        was: Status,
        owner: Option<Owner>,
    },
    Gone,
}
