//! The token by which a repeated write is recognised.

use std::fmt;

/// A random number for a write that must not be applied twice. A write repeated with the same token, because
/// its reply was lost, returns what the first one did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IdempotencyToken(pub u64);

impl fmt::Display for IdempotencyToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}
