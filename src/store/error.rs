//! Why an operation of the store failed, and when to retry it.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::ids::ResponseId;

/// Why an operation of the store failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The store was not reached: nothing was written.
    Unavailable {
        retry_after: Duration,
        reason: Arc<str>,
    },
    /// No answer within the time-out: a write may or may not have been applied.
    Unknown {
        retry_after: Duration,
        reason: Arc<str>,
    },
    /// The store is full of records that cannot be evicted. Nothing was written.
    Full { retry_after: Duration },
    /// The value exceeds the configured maximum. Retrying cannot help.
    TooLarge { bytes: u64, max: u64 },
    /// `create`: the id belongs to a record that was created with another token.
    Exists,
    /// `create`: this response, which it continues, is missing. Nothing was written.
    BrokenChain(ResponseId),
    /// The record is damaged, or was written by a newer release.
    Unreadable(Arc<str>),
    /// A part of the conversation is lost, because the store evicted it.
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

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unavailable { reason, .. } => {
                write!(f, "the response store is unavailable: {reason}")
            }
            Self::Unknown { reason, .. } => {
                write!(f, "the response store did not confirm the write: {reason}")
            }
            Self::Full { .. } => f.write_str("the response store is full"),
            Self::TooLarge { bytes, max } => {
                write!(
                    f,
                    "{bytes} bytes exceed the maximum of {max} bytes for a stored response"
                )
            }
            Self::Exists => f.write_str("the id exists already"),
            Self::BrokenChain(missing) => {
                write!(
                    f,
                    "{missing}, which the response continues, is not stored any more"
                )
            }
            Self::Unreadable(reason) => write!(f, "the stored record cannot be decoded: {reason}"),
            Self::DamagedConversation => {
                f.write_str("a part of the conversation is lost: the store has evicted it")
            }
        }
    }
}

impl std::error::Error for Error {}
