//! What requests need to know of their tenant. Pure.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::ids::Tenant;
use crate::limits::TenantLimits;

/// One tenant, as one configuration describes it.
#[derive(Debug, Default)]
pub struct TenantProfile {
    /// The id that is derived from its name.
    pub id: Tenant,
    /// For logs and metrics.
    pub name: Arc<str>,
    /// In the queue, of a request that asks for none.
    pub priority: i32,
    /// The highest that its requests may have.
    pub max_priority: i32,
    /// What it may use; `None`: anything.
    pub limits: Option<Arc<TenantLimits>>,
}

#[derive(Debug)]
pub struct TenantTable {
    by_id: FxHashMap<Tenant, Arc<TenantProfile>>,
    /// For a tenant that the configuration does not list: the only tenant if none are configured, one that a token
    /// names, and the owner of a background response whose tenant was removed since.
    unlisted: Arc<TenantProfile>,
    /// Whether any of the listed tenants has a priority, or a highest one.
    pub(in crate::relay) has_priorities: bool,
}

impl TenantTable {
    pub fn new(listed: impl IntoIterator<Item = TenantProfile>) -> Self {
        let entry = |mut profile: TenantProfile| {
            profile.id = Tenant::of(&profile.name);
            (profile.id, Arc::new(profile))
        };
        let by_id: FxHashMap<_, Arc<TenantProfile>> = listed.into_iter().map(entry).collect();
        let has_one =
            |tenant: &Arc<TenantProfile>| tenant.priority != 0 || tenant.max_priority != 0;
        Self {
            has_priorities: by_id.values().any(has_one),
            by_id,
            unlisted: Arc::new(unlisted(None)),
        }
    }

    /// Tenants that are not listed have the profile of this one, if it is.
    #[must_use]
    pub fn with_default(mut self, name: &str) -> Self {
        if let Some(profile) = self.by_id.get(&Tenant::of(name)) {
            self.unlisted = profile.clone();
        }
        self
    }

    /// What all clients together may use, where no tenants are listed.
    #[must_use]
    pub fn with_limits(mut self, limits: Arc<TenantLimits>) -> Self {
        self.unlisted = Arc::new(unlisted(Some(limits)));
        self
    }

    pub fn of(&self, tenant: Tenant) -> &Arc<TenantProfile> {
        self.by_id.get(&tenant).unwrap_or(&self.unlisted)
    }

    /// The tenants that the configuration lists, or limits without a list, in no particular order.
    pub fn listed(&self) -> impl Iterator<Item = &Arc<TenantProfile>> {
        let everybody = Some(&self.unlisted);
        let everybody = everybody.filter(|all| self.by_id.is_empty() && all.limits.is_some());
        self.by_id.values().chain(everybody)
    }

    /// The ids of all profiles.
    pub(in crate::relay) fn ids(&self) -> impl Iterator<Item = Tenant> {
        let listed = self.by_id.keys().copied();
        listed.chain([self.unlisted.id])
    }
}

fn unlisted(limits: Option<Arc<TenantLimits>>) -> TenantProfile {
    TenantProfile {
        id: Tenant::default(),
        name: Tenant::DEFAULT.into(),
        limits,
        ..TenantProfile::default()
    }
}

impl Default for TenantTable {
    fn default() -> Self {
        Self::new([])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_that_is_not_listed_has_the_default_profile() {
        let table = TenantTable::new(["a", "b"].map(|name| TenantProfile {
            name: name.into(),
            ..TenantProfile::default()
        }));
        assert_eq!(&*table.of(Tenant::of("a")).name, "a");
        assert_eq!(&*table.of(Tenant::of("c")).name, "default");
        assert_eq!(table.listed().count(), 2);
        let table = table.with_default("b");
        assert_eq!(&*table.of(Tenant::of("c")).name, "b");
        assert_eq!(&*table.with_default("").of(Tenant::of("c")).name, "b");
    }
}
