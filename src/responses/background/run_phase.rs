//! The phases of a run. [`RunState`](super::run_state::RunState) shows the transitions. Pure.

pub(super) const STOPPED: &str = "The router that ran this response was stopped.";
pub(super) const TOO_LONG: &str = "The response took too long.";
pub(super) const REFUSED: &str = "The response could not be stored.";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Generating,
    /// `reason`: the failure message that follows; `None` after a cancel.
    ReadingStored {
        reason: Option<&'static str>,
    },
    Failing {
        reason: &'static str,
    },
    /// The final event is written; the end is to be stored.
    Finalizing,
    DroppingOutput,
    /// As `Finalizing`, with a failure instead of the output that the store rejected as too large.
    FinalizingWithoutOutput,
    ReadingCancelled,
    StoringPartial,
    Releasing,
    /// `is_complete`: the end is stored and all events are here.
    Over {
        is_complete: bool,
    },
}
