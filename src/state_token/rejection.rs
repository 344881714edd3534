//! Why a carrier is not opened, or not made. Pure.

use std::fmt;

/// Why a carrier was not opened. For metrics: a client is told no more than [`Rejected`] shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectReason {
    /// Not one of ours.
    Malformed,
    /// Larger than allowed, as text or unpacked.
    TooLarge,
    /// Of no key that we have.
    UnknownKey,
    /// Changed, made up, or another tenant's.
    BadSignature,
    /// Signed for this tenant, and says another. No replica writes that.
    WrongTenant,
    Expired,
    /// Signed, and not to be read by this release.
    Unreadable,
}

impl RejectReason {
    pub const ALL: [Self; 7] = [
        Self::Malformed,
        Self::TooLarge,
        Self::UnknownKey,
        Self::BadSignature,
        Self::WrongTenant,
        Self::Expired,
        Self::Unreadable,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::TooLarge => "too_large",
            Self::UnknownKey => "unknown_key",
            Self::BadSignature => "bad_signature",
            Self::WrongTenant => "wrong_tenant",
            Self::Expired => "expired",
            Self::Unreadable => "unreadable",
        }
    }
}

/// A carrier that was not opened. Shows the message for its client, the same for everything but age, so
/// that it tells nothing of keys and tenants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejected {
    pub reason: RejectReason,
    /// Its first and last characters, by which a client may know which one it was.
    shown: String,
}

impl Rejected {
    pub(super) fn new(reason: RejectReason, text: &str) -> Self {
        const FIRST: usize = 8;
        const LAST: usize = 4;
        let shown = match text.char_indices().nth(FIRST + LAST) {
            None => text.to_owned(),
            Some(_) => {
                let first: String = text.chars().take(FIRST).collect();
                let last = text.char_indices().rev().nth(LAST - 1);
                let last = last.map_or("", |(at, _)| &text[at..]);
                format!("{first}...{last}")
            }
        };
        Self { reason, shown }
    }
}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = match self.reason {
            RejectReason::Expired => "has expired",
            _ => "could not be verified",
        };
        write!(f, "The encrypted content {} {why}.", self.shown)
    }
}

/// Items that no carrier can take. Never cut short instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TooLarge {
    /// Before compression.
    Items { max: u64 },
    /// As text.
    Text { max: u64 },
}

impl fmt::Display for TooLarge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Items { max } => write!(
                f,
                "the conversation is larger than the {max} bytes that an encrypted content can carry"
            ),
            Self::Text { max } => write!(
                f,
                "the conversation makes an encrypted content of more than {max} bytes"
            ),
        }
    }
}
