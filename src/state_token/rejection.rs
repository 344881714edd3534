//! Why a token is rejected, or cannot be issued. Pure.

use std::fmt;

use crate::observe::metrics::words;

words! {
    /// Why a token was rejected. For metrics only: the client sees the message of [`Rejected`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum RejectReason {
        /// Not in the form of a token.
        Malformed = "malformed",
        /// Larger than allowed, as text or decompressed.
        TooLarge = "too_large",
        /// Signed with a key that is not in the key ring.
        UnknownKey = "unknown_key",
        /// Changed, forged, or another tenant's.
        BadSignature = "bad_signature",
        /// Signed for this tenant, but its header names another. No replica writes such a token.
        WrongTenant = "wrong_tenant",
        Expired = "expired",
        /// Correctly signed, but this release cannot decode it.
        Unreadable = "unreadable",
    }
}

/// A rejected token. Displays the message for the client, which is the same for every reason but expiry and so
/// reveals nothing about keys and tenants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejected {
    pub reason: RejectReason,
    /// The first and last characters of the token, so that the client can identify it.
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

/// Items that do not fit into a token. They are never truncated instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TooLarge {
    /// Before compression.
    #[error("the conversation is larger than the {max} bytes that an encrypted content can carry")]
    Items { max: u64 },
    #[error("the conversation makes an encrypted content of more than {max} bytes")]
    Text { max: u64 },
}
