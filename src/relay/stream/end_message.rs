//! The messages of the terminal events of streams that ended early, and what such a message says of the end. Pure.

use crate::queue::RefusalReason;

/// The engine ended the stream without a terminal event.
pub(super) const ENDED_EARLY: &str = "the engine ended the stream before the answer's end";
/// The engine gave the stream up, mostly because it is shut down.
pub(super) const ENGINE_ERROR: &str = "the engine failed before the answer's end";
/// The connection broke.
pub(super) const CLOSED_EARLY: &str = "the engine closed its connection before the answer's end";
pub(super) const STOPPED: &str = "the engine stopped sending";
pub(super) const DOWN: &str = "the engine stopped sending, and its health checks fail";
pub(super) const TOO_LONG: &str = "the request took longer than the router allows";
/// The stream outlasts the router's drain.
pub(super) const DRAINED: &str = "this router is about to end, and the answer with it; try again";

pub(super) fn code_of(message: &str) -> &'static str {
    if message == DRAINED {
        RefusalReason::Draining.code()
    } else {
        "engine_stream_broken"
    }
}

/// Whether this is the message of a terminal event that stands for the end of the router's drain.
pub fn is_drained(message: &str) -> bool {
    message == DRAINED
}

/// Whether this is the message of a terminal event that stands for a lost engine: one that died, was shut down or stopped sending.
pub fn is_engine_lost(message: &str) -> bool {
    [CLOSED_EARLY, ENDED_EARLY, ENGINE_ERROR, STOPPED, DOWN].contains(&message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_says_whether_the_engine_is_lost_or_the_router_ends() {
        for (message, is_lost, is_drain) in [
            (CLOSED_EARLY, true, false),
            (DOWN, true, false),
            (TOO_LONG, false, false),
            (DRAINED, false, true),
            ("the model says so", false, false),
        ] {
            assert_eq!(is_engine_lost(message), is_lost, "{message}");
            assert_eq!(is_drained(message), is_drain, "{message}");
        }
    }
}
