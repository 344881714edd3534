//! Why an operation of the store failed, and when to retry it.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::ids::ResponseId;

/// Why an operation of the store failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The store was not reached: nothing was written.
    #[error("the response store is unavailable: {reason}")]
    Unavailable {
        retry_after: Duration,
        reason: Arc<str>,
    },
    /// No answer within the time-out: a write may or may not have been applied.
    #[error("the response store did not confirm the write: {reason}")]
    Unknown {
        retry_after: Duration,
        reason: Arc<str>,
    },
    /// The store is full of records that cannot be evicted. Nothing was written.
    #[error("the response store is full")]
    Full { retry_after: Duration },
    /// The value exceeds the configured maximum. Retrying cannot help.
    #[error("{bytes} bytes exceed the maximum of {max} bytes for a stored response")]
    TooLarge { bytes: u64, max: u64 },
    /// `create`: the id belongs to a record that was created with another token.
    #[error("the id exists already")]
    Exists,
    /// `create`: this response, which it continues, is missing. Nothing was written.
    #[error("{0}, which the response continues, is not stored any more")]
    BrokenChain(ResponseId),
    /// The record is damaged, or was written by a newer release.
    #[error("the stored record cannot be decoded: {0}")]
    Unreadable(Arc<str>),
    /// A part of the conversation is lost, because the store evicted it.
    #[error("a part of the conversation is lost: the store has evicted it")]
    DamagedConversation,
}

/// The future that an operation returns. It may be polled on any tokio runtime of the process, but must stay
/// on the I/O thread that polled it first.
pub type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send + 'a>>;

impl Error {
    /// When to retry, if that can help.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Unavailable { retry_after, .. }
            | Self::Unknown { retry_after, .. }
            | Self::Full { retry_after } => Some(*retry_after),
            Self::TooLarge { .. }
            | Self::Exists
            | Self::BrokenChain(_)
            | Self::Unreadable(_)
            | Self::DamagedConversation => None,
        }
    }

    /// For the `outcome` label of metrics.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Unavailable { .. } => "unavailable",
            Self::Unknown { .. } => "unknown",
            Self::Full { .. } => "full",
            Self::TooLarge { .. } => "too_large",
            Self::Exists => "exists",
            Self::BrokenChain(_) => "broken_chain",
            Self::Unreadable(_) => "unreadable",
            Self::DamagedConversation => "damaged",
        }
    }
}
