//! Why a response fails though its engine did what it was asked: codes and messages for clients. Pure.

use crate::store::CommitRefusal;

/// The code of a response before which another one was added to its conversation.
pub const CHANGED: &str = "conversation_changed";
/// How often such a response is generated again. A holder rarely loses its lock; a machine on which that happens again
/// and again is too busy for more.
pub const HISTORIES_MAX: u32 = 3;

/// Why a response fails, as its client reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailReason {
    pub code: &'static str,
    pub message: &'static str,
}

impl FailReason {
    pub const fn of_server(message: &'static str) -> Self {
        let code = "server_error";
        Self { code, message }
    }

    /// Its conversation did not accept its items.
    pub const fn of_conversation(refusal: CommitRefusal) -> Self {
        let (code, message) = match refusal {
            CommitRefusal::Unlocked | CommitRefusal::Taken => (
                CHANGED,
                "Another response was added to the conversation while this one was generated, which has not seen it.",
            ),
            CommitRefusal::Gone => (
                "conversation_not_found",
                "The conversation was deleted while the response was generated.",
            ),
            CommitRefusal::TooLarge => (
                "conversation_too_large",
                "With this response the conversation would be larger than the store allows.",
            ),
            CommitRefusal::Damaged => (
                "conversation_damaged",
                "A part of the conversation was lost while the response was generated.",
            ),
        };
        Self { code, message }
    }
}
