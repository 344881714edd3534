//! What requests need to know of their tenants, from the configuration.

use crate::config::Config;
use crate::relay::{TenantProfile, TenantTable};

pub(super) fn table(config: &Config) -> TenantTable {
    TenantTable::new(config.tenants.iter().map(|tenant| TenantProfile {
        name: tenant.name.as_str().into(),
        priority: tenant.priority,
        max_priority: tenant.max_priority.unwrap_or(tenant.priority),
    }))
}
