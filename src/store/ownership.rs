//! Which replica runs a background response: owners, fencing tokens, orphans and takeovers.

use std::fmt;

use super::keys::ResponseKey;
use super::status::Status;

/// One run of a replica process. A restarted replica is a new owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner(pub u64);

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The right to write to a running background response. Each takeover and each release increments the number,
/// so the store can refuse writes of former owners.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FencingToken {
    pub owner: Owner,
    pub number: u64,
}

impl FencingToken {
    /// The token of the creator of a background response.
    pub fn first(owner: Owner) -> Self {
        Self { owner, number: 1 }
    }
}

/// Why an owner may no longer run a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnershipLoss {
    Gone,
    Fenced,
    Terminal(Status),
}

/// A response without a live owner that has work left: the owner's lease has expired, or the owner released it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Orphan {
    pub key: ResponseKey,
    /// Compared by `Ownership::take_over`, so that only one replica takes it over.
    pub owner: Option<Owner>,
    pub fencing_number: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Takeover {
    /// The caller owns the response now, and decides whether to run it again.
    Done(TakenOver),
    /// Another replica was faster, or the owner has renewed its lease.
    Raced,
    Terminal(Status),
    Gone,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TakenOver {
    pub fence: FencingToken,
    pub status: Status,
    /// How often it was started, including this run. A run counts once an engine has started it.
    pub attempts: u32,
    /// How many of its owners were lost, whether their runs had started or not.
    pub lost_owners: u32,
    pub streams: bool,
    pub last_event: Option<u64>,
}
