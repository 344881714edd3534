//! Which models a tenant may use. That is asked once, before a request waits for anything, and no text that a client gets names
//! another one.

use super::core::Relay;
use super::job::Error;
use super::request::target::Name;
use crate::ids::Tenant;
use crate::limits::TenantLimits;

impl Relay {
    /// Whether a tenant may ask for a name: for itself, or for a model that it stands for.
    pub fn may_use(&self, tenant: Tenant, name: &str) -> bool {
        let limits = self.tenants().of(tenant).limits.as_ref();
        limits.is_none_or(|limits| self.is_allowed(limits, name))
    }

    fn is_allowed(&self, limits: &TenantLimits, name: &str) -> bool {
        let names = self.names();
        let leads_to_allowed = |name| names.models_of(name).any(|model| limits.allows(model));
        limits.allows(name) || names.get(name).is_some_and(leads_to_allowed)
    }

    /// Whether a tenant may use a model that a name leads to, when it asks for that name.
    pub(super) fn may_use_for(&self, tenant: Tenant, name: &Name, model: &str) -> bool {
        let limits = self.tenants().of(tenant).limits.as_ref();
        limits.is_none_or(|limits| limits.allows(&name.requested) || limits.allows(model))
    }

    /// Whether requests for a name may find a worker, for who can wait: the name is known, or a worker that is listed
    /// has yet to say what it serves, or none is listed.
    pub fn may_know(&self, name: &str) -> bool {
        let snapshot = self.fleet().snapshot();
        self.knows(name) || snapshot.has_unprobed_workers() || snapshot.may_serve_others()
    }

    /// Whether a worker serves a name, the last one that did left lately, or the configuration names it.
    pub(super) fn knows(&self, name: &str) -> bool {
        self.fleet().snapshot().models.contains_key(name)
            || self.names().get(name).is_some()
            || self.queues().is_known(name)
            || self.fleet().lost_lately(name)
    }

    /// The most output tokens that a tenant may ask for under a name, whichever model the name leads to. `None`: any number.
    pub fn max_output_tokens(&self, tenant: Tenant, name: &str) -> Option<u64> {
        let limits = self.tenants().of(tenant).limits.as_ref()?;
        let names = self.names();
        let models = names
            .get(name)
            .into_iter()
            .flat_map(|name| names.models_of(name));
        let of_models = models.map(|model| limits.max_tokens(name, Some(&**model)));
        let own = limits.max_tokens(name, None);
        of_models.chain([own]).flatten().min()
    }

    pub(super) fn check_right(&self, tenant: Tenant, name: Option<&str>) -> Result<(), Error> {
        match (name, &self.tenants().of(tenant).limits) {
            (Some(name), Some(limits)) if !self.is_allowed(limits, name) => {
                Err(Error::Limited(Box::new(limits.refuse_model(name))))
            }
            _ => Ok(()),
        }
    }

    /// An error as a tenant may see it.
    pub(super) fn without_others(&self, tenant: Tenant, mut error: Error) -> Error {
        if let Error::UnknownModel { known, .. } | Error::NoModel { known } = &mut error {
            known.retain(|name| self.may_use(tenant, name));
        }
        error
    }
}
