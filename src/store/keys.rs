//! The keys of stored responses and conversations, and the token by which a repeated write is recognised. The tenant is
//! part of the key, so that no tenant reads another tenant's data.

use std::fmt;

use crate::ids::{ConversationId, ResponseId, Tenant};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ResponseKey {
    pub tenant: Tenant,
    pub id: ResponseId,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConversationKey {
    pub tenant: Tenant,
    pub id: ConversationId,
}

/// A random number for a write that must not be applied twice. A write repeated with the same token, because
/// its reply was lost, returns what the first one did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IdempotencyToken(pub u64);

impl fmt::Display for IdempotencyToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}
