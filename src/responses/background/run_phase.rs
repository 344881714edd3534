//! The phases of a background run. [`super::run_state`] shows the transitions between them.

// Error messages of failed responses, for clients.
pub(super) const STOPPED: &str = "The router that ran this response was stopped.";
pub(super) const LOST: &str = "The replica that ran this response was lost.";
pub(super) const TOO_LONG: &str = "The response took too long.";
pub(super) const CONVERSATION_LOST: &str = "The replica that ran this response was lost, and its conversation was continued by another response.";
pub(super) const REFUSED: &str = "The response could not be stored.";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The engine's answer is awaited or read.
    Generating,
    /// The events that another replica stored are read, because they become part of the output. `reason`: the error
    /// message with which the response will fail; `None` if it was cancelled.
    ReadingStored { reason: Option<&'static str> },
    /// The events and token ids that another replica stored are read, because this one goes on after them.
    ReadingToGoOn,
    /// They are read: the run is to be set up as if it had written them itself.
    SettingUp,
    /// The events of the failure are to be written.
    Failing { reason: &'static str },
    /// The final event is written to the log; the final record is to be stored.
    Finalizing,
    /// The store rejected the final record as too large; a failed response without output is to be built.
    DroppingOutput,
    /// The failed response without output is to be stored.
    FinalizingWithoutOutput,
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
