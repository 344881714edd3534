//! The keys of stored responses and conversations. The tenant is part of the key, so that no tenant reads another
//! tenant's data.

use crate::ids::{ConversationId, ResponseId, Tenant};

/// Identifies a response of a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ResponseKey {
    pub tenant: Tenant,
    pub id: ResponseId,
}

/// Identifies a conversation of a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConversationKey {
    pub tenant: Tenant,
    pub id: ConversationId,
}
