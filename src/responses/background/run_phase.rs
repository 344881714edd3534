//! The phases of a background run. [`super::run_state`] shows the transitions between them.

use crate::responses::fail_reason::FailReason;

pub(super) const STOPPED: FailReason =
    FailReason::of_server("The router that ran this response was stopped.");
pub(super) const LOST: FailReason =
    FailReason::of_server("The replica that ran this response was lost.");
pub(super) const ALL_LOST: FailReason =
    FailReason::of_server("Every replica that ran this response was lost.");
pub(super) const TOO_LONG: FailReason = FailReason::of_server("The response took too long.");
pub(super) const REFUSED: FailReason = FailReason::of_server("The response could not be stored.");
pub(super) const TOO_LARGE: FailReason =
    FailReason::of_server("The response is larger than the store allows.");

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The engine's answer is awaited or read.
    Generating,
    /// The events that another replica stored are read, because they become part of the output. `reason`: the error
    /// message with which the response will fail; `None` if it was cancelled.
    ReadingStored { reason: Option<FailReason> },
    /// The events and token ids that another replica stored are read, because this one goes on after them.
    ReadingToGoOn,
    /// They are read: the run is to be set up as if it had written them itself.
    SettingUp,
    /// The events of the failure are to be written.
    Failing { reason: FailReason },
    /// The final event is written to the log; the final record is to be stored.
    Finalizing,
    /// The store rejected the end, or its conversation did; a failed response is to be built instead.
    FailingInstead {
        reason: FailReason,
        keeps_output: bool,
    },
    /// The failed response is to be stored instead.
    FinalizingInstead { keeps_output: bool },
    /// The response was cancelled; its record is to be read.
    ReadingCancelled,
    /// The store lost the cancel, in a failover: the response is to be cancelled again.
    CancellingAgain,
    /// The output that readers had received before the cancel is to be stored.
    StoringPartial,
    /// The response is to be released in the store, so that another replica can take it over.
    Releasing,
    /// `is_complete`: the end is stored, and this replica has all events in memory.
    Over { is_complete: bool },
}
