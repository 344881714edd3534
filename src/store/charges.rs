//! What a request counts in the limits of its tenant, as a store keeps it for all replicas. Pure types; which limits
//! there are, and what follows from a refusal, is decided by those who ask.
//!
//! Times are microseconds. A limit is one number, the time at which all of it may be used again; what is used of it is
//! how far that time is ahead.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use crate::ids::{RequestId, ResponseId};

/// What is charged once, however often it is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChargeId {
    /// A client's request.
    Request(RequestId),
    /// A background response, which another replica may run again.
    Response(ResponseId),
    /// A try of a line of a batch. It does not count among the requests that run.
    Line(RequestId),
}

impl ChargeId {
    /// Whether it stays charged after its end.
    pub fn is_once(&self) -> bool {
        matches!(self, Self::Response(_))
    }

    pub fn is_line(&self) -> bool {
        matches!(self, Self::Line(_))
    }
}

impl fmt::Display for ChargeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request(id) | Self::Line(id) => id.fmt(f),
            Self::Response(id) => id.fmt(f),
        }
    }
}

impl fmt::Debug for ChargeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// One limit that a request counts in.
#[derive(Clone, Debug, PartialEq)]
pub struct LimitCharge {
    /// The name of the limit among those of its tenant.
    pub limit: Arc<str>,
    pub burst: u64,
    pub cost: u64,
    /// What this replica believes to be used, for a store that has lost it.
    pub believed: u64,
}

/// The correction of a charge when its request has ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Settlement {
    pub id: ChargeId,
    /// Whether everything is given back, so that the same id may be charged again.
    pub is_refund: bool,
    pub corrections: SmallVec<[(Arc<str>, i64); 2]>,
}

/// A charge to all of some limits, or to none of them.
#[derive(Clone, Debug)]
pub struct Charge {
    pub id: ChargeId,
    pub limits: SmallVec<[LimitCharge; 2]>,
    /// 0: any number of requests may run.
    pub max_concurrent: u32,
}

/// Charges of one tenant that are made together, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Charges<'a> {
    pub charges: &'a [Charge],
    /// Applied before.
    pub settlements: &'a [Settlement],
    pub lease: Duration,
    pub charge_once: Duration,
    /// Whether this replica has counted alone since the store last answered: what it believes counts then.
    pub was_apart: bool,
}

/// What is said of a charge: by the store, or by a replica that counts alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChargeReply {
    pub is_granted: bool,
    /// Requests of the tenant that run, this one included if it is granted; if a replica counts alone, those that run there.
    pub running: u64,
    /// What is used of each limit, in the order of the charge: after it if it is granted.
    pub used: SmallVec<[u64; 4]>,
}
