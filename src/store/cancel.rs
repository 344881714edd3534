//! The cancellation bus: what owners are told of the responses that they run.

use super::Key;

/// A response of the owner's that it need not run any longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notice {
    pub key: Key,
    pub what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    Cancelled,
    Deleted,
}

/// How far an owner has read its notices. Only the store that made it can read it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cursor(pub u64, pub u64);
