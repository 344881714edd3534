//! A response's life: which status may follow which, and what a store is told and tells of it.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use super::log::EventBatch;
use crate::ids::{Model, ResponseId};

/// Where a response is in its life. The last four are terminal: nothing follows them but deletion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Status {
    Queued,
    InProgress,
    Completed,
    Incomplete,
    Failed,
    Cancelled,
}

impl Status {
    pub const ALL: [Self; 6] = [
        Self::Queued,
        Self::InProgress,
        Self::Completed,
        Self::Incomplete,
        Self::Failed,
        Self::Cancelled,
    ];

    /// As clients read it in `status`, and as stores keep it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
            Self::Incomplete => "incomplete",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.as_str() == text)
    }

    pub fn is_terminal(self) -> bool {
        !matches!(self, Self::Queued | Self::InProgress)
    }

    /// Whether another response may have it as its past.
    pub fn is_continuable(self) -> bool {
        matches!(self, Self::Completed | Self::Incomplete)
    }

    /// Whether this status may become `next`. Re-queueing is no transition: an adopter goes on with
    /// the status it finds, under its own epoch.
    pub fn may_become(self, next: Self) -> bool {
        match self {
            Self::Queued => next != Self::Queued,
            Self::InProgress => next.is_terminal(),
            Self::Completed | Self::Incomplete | Self::Failed | Self::Cancelled => false,
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One life of one replica. A restarted replica is another owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner(pub u64);

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// By what right a background response is written to: each adoption and each release raises the
/// epoch, so whoever held it before writes nothing more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FencingToken {
    pub owner: Owner,
    pub number: u64,
}

impl FencingToken {
    /// The right of whoever creates a background response.
    pub fn first(owner: Owner) -> Self {
        Self { owner, number: 1 }
    }
}

/// Random, one for each write that must not be done twice. A write that is repeated with its token
/// (because its answer was lost) is known again and answered as the first time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IdempotencyToken(pub u64);

impl fmt::Display for IdempotencyToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Where the response was computed, for a continuation that no cache event can place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutingHint {
    pub model: Model,
    /// Name of the last worker, as the fleet lists it.
    pub worker: Option<Arc<str>>,
}

/// How long a record is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retention {
    /// `store: true`: for the store's record TTL.
    Stored,
    /// `background` with `store: false`: for polling only, some minutes after its end. It has no
    /// history and no input items.
    Ephemeral,
}

/// The values of a record: JSON that the store never looks into.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content {
    /// The Response object but for its `output`.
    pub response: Bytes,
    /// Array of output items.
    pub output: Bytes,
}

/// The response that another one continues, as [`super::History`] told it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The whole chain, oldest first; its last is the one continued.
    pub ids: Arc<[ResponseId]>,
    /// Of all its input and output items together.
    pub bytes: u64,
}

/// What a response begins with in the store.
#[derive(Clone, Debug)]
pub struct NewRecord {
    pub token: IdempotencyToken,
    /// The chain that it continues. All of it has this response's root.
    pub parent: Option<Chain>,
    pub hint: RoutingHint,
    /// Array of this call's own input items.
    pub input: Bytes,
    /// A finished response, or the object it would be told as until it is finished.
    pub content: Content,
    pub initial: InitialState,
}

/// In which state a record comes into being.
#[derive(Clone, Debug)]
pub enum InitialState {
    /// A foreground response, written once, when all of it is known.
    Finished { status: Status },
    /// Queued in the background.
    Background {
        fence: FencingToken,
        retention: Retention,
        /// Asked for with `stream: true`.
        streams: bool,
        /// What whoever adopts it runs again. Forgotten at its end.
        request: Bytes,
    },
}

/// What is known of a response.
#[derive(Clone, Debug)]
pub struct Record {
    pub status: Status,
    pub hint: RoutingHint,
    /// The response it continues.
    pub previous: Option<ResponseId>,
    /// As last written: while it runs, as it was created.
    pub content: Content,
    /// `None` for a foreground response.
    pub background: Option<Background>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Background {
    /// Who runs it, or ran it. Its owner is `None` between release and adoption.
    pub owner: Option<Owner>,
    pub fencing_number: u64,
    /// How often it was begun, this time included.
    pub attempts: u32,
    pub retention: Retention,
    pub streams: bool,
    /// The number of the last event.
    pub last_event: Option<u64>,
}

/// How a background response ends.
#[derive(Clone, Debug)]
pub struct Finalization {
    pub token: IdempotencyToken,
    /// A terminal one, and not `Cancelled`: that comes of [`super::ResponseStore::cancel`] alone.
    pub status: Status,
    pub content: Content,
    pub hint: RoutingHint,
    /// The last events, the terminal one included, in the same write.
    pub batch: Option<EventBatch>,
    /// Where the events cut the final text, so that they can be told again after the log is gone. The
    /// store never looks into it.
    pub delta_table: Bytes,
}

/// How a background response is cancelled.
#[derive(Clone, Debug)]
pub struct Cancellation {
    pub token: IdempotencyToken,
    /// The Response object with status `cancelled`, without `output`.
    pub response: Bytes,
    /// The terminal event, which gets the number after the last; it must not carry one itself.
    pub event: Bytes,
}

/// The output as far as the log has it, which only the owner knows, after a cancel.
#[derive(Clone, Debug)]
pub struct CancelledOutput {
    pub content: Content,
    pub delta_table: Bytes,
}

/// Outcome of a conditional write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum WriteOutcome {
    /// Done now, or before, by a write with the same token.
    Done,
    /// Deleted, expired, or never there. Whoever runs it stops, and nothing is written again.
    Gone,
    /// Another owner has it. Whoever runs it stops.
    Fenced,
    /// It has ended, with this status.
    Terminal(Status),
    /// These events are in the log already, which ends at this number.
    Duplicate { last: u64 },
    /// Events before these are missing: the log ends at this number. The owner appends from there.
    Gap { last: Option<u64> },
    /// The log is full. The response may go on; its events are no longer kept, but for the last.
    Overflow,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum CancelOutcome {
    /// Cancelled now. Its owner, if it has one, was sent a notice.
    Done {
        was: Status,
        owner: Option<Owner>,
    },
    /// It had ended before, with this status.
    Terminal(Status),
    /// A foreground response.
    NotBackground,
    Gone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum DeleteOutcome {
    /// Its owner, if it was running, was sent a notice.
    Done {
        was: Status,
        owner: Option<Owner>,
    },
    Gone,
}

#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Takeover {
    /// The caller owns it now. Whether to run it again is its own decision.
    Done(TakenOver),
    /// Somebody else was faster, or its owner lives.
    Raced,
    Terminal(Status),
    Gone,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TakenOver {
    pub fence: FencingToken,
    pub status: Status,
    /// How often it was begun, this time included.
    pub attempts: u32,
    pub streams: bool,
    pub last_event: Option<u64>,
    /// As given at its creation.
    pub request: Bytes,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_status_is_for_ever() {
        for from in Status::ALL {
            for to in Status::ALL {
                let expected = match (from, to) {
                    (Status::Queued, to) => to != Status::Queued,
                    (Status::InProgress, to) => to.is_terminal(),
                    _ => false,
                };
                assert_eq!(from.may_become(to), expected, "{from} -> {to}");
            }
        }
    }

    #[test]
    fn a_status_is_read_back_as_it_was_written() {
        for status in Status::ALL {
            assert_eq!(Status::parse(status.as_str()), Some(status));
        }
        assert_eq!(Status::parse("done"), None);
    }
}
