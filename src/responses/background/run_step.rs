//! The steps of a run, and why it stops: outputs and inputs of [`RunState`](super::run_state::RunState). Pure.

use crate::observe::metrics::words;
use crate::responses::fail_reason::FailReason;
use crate::store::EventBatch;

/// The number of events that are written before an engine has answered. Every replica that starts the
/// response again writes the same ones.
pub const FIRST_EVENTS: u64 = 3;

words! {
    /// Why a run stops before its engine has finished.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum StopReason {
        /// The response was cancelled or deleted.
        Cancelled = "cancelled",
        /// Another replica has taken the response over.
        LeaseLost = "lease_lost",
        /// This replica is stopping.
        Draining = "draining",
        /// The run exceeded its time limit.
        TimeLimit = "time_limit",
        /// The store rejects its events for good.
        StoreRefused = "store_refused",
    }
}

/// What the driver of a run must do next.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Step {
    /// Send the request to an engine, or read on from its answer.
    ReadEngine,
    /// Set the record's status to in progress.
    MarkStarted,
    Append(EventBatch),
    /// Read events that another replica stored, after this number.
    ReadStored {
        after: Option<u64>,
    },
    /// Go on after the stored events, as if this replica had written them: or find out that it cannot.
    GoOn,
    /// Build the final event of a failed response. `has_stored_output`: its output is what another
    /// replica stored, which was read before.
    Fail {
        reason: FailReason,
        has_stored_output: bool,
    },
    /// Build a failed response instead of the end that the store rejects. Its final event gets this number.
    /// `keeps_output`: it has the output of that end.
    FailInstead {
        number: u64,
        reason: FailReason,
        keeps_output: bool,
    },
    /// Store the final status, with these last events.
    Finalize(Option<EventBatch>),
    /// Read the record, whose status should be cancelled.
    ReadCancelled,
    /// Cancel the response again, whose cancel the store has lost.
    CancelAgain,
    /// Store the output of a cancelled response: what its readers have received.
    StorePartial,
    /// Give up ownership, so that any replica may take the response over.
    Release,
    /// Nothing is left to do.
    Done,
}

/// When to take the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Then {
    Continue,
    /// The store was unreachable: repeat the step after a pause.
    RetryLater,
}

/// Where a reader on the owning replica finds its next events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tail<'a> {
    /// Here: stored events up to `last`. `is_end`: the response has ended and these are the last.
    InMemory {
        text: &'a [u8],
        last: Option<u64>,
        is_end: bool,
    },
    /// In the store, for these events.
    InStore,
    /// In the store from now on: nothing runs here any more.
    NotRunning,
}
