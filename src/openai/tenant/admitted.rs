//! Whose request it is, once that is known.

use std::sync::Arc;

use prometheus::{IntCounter, IntCounterVec};

#[cfg(feature = "jwt")]
use super::spec::TenantSpec;
use crate::ids::Tenant;
use crate::secret::Secret;

/// The tenant of a request whose key is valid.
#[derive(Clone, Debug)]
pub struct Admitted {
    pub tenant: Tenant,
    pub name: Arc<str>,
    /// By which [`Tenants::of_name`](super::Tenants::of_name) finds it: of a tenant that only tokens name, not that of
    /// the one as which it is counted.
    pub own_name: Arc<str>,
    /// `cache_salt` for engines, as JSON.
    pub cache_salt: Option<Arc<Salt>>,
    pub(super) requests: IntCounter,
}

/// A salt as the field of a body.
#[derive(Debug, PartialEq)]
pub struct Salt {
    /// `"cache_salt":"..."`.
    pub field: String,
}

impl Admitted {
    pub(super) fn of(name: &str, salt: &Secret, requests: &IntCounterVec) -> Self {
        Self {
            tenant: Tenant::of(name),
            name: name.into(),
            own_name: name.into(),
            cache_salt: Salt::of(salt).map(Arc::new),
            requests: requests.with_label_values(&[name]),
        }
    }

    /// A tenant that the configuration does not list and that is counted as this one.
    #[cfg(feature = "jwt")]
    pub(super) fn for_unlisted(&self, unlisted: &TenantSpec) -> Self {
        Self {
            tenant: Tenant::of(&unlisted.name),
            own_name: unlisted.name.as_str().into(),
            cache_salt: Salt::of(&unlisted.cache_salt).map(Arc::new),
            ..self.clone()
        }
    }
}

impl Salt {
    /// `None` for an empty text.
    pub fn of(text: &Secret) -> Option<Self> {
        let value = serde_json::Value::from(text.expose());
        (!text.is_empty()).then(|| Self {
            field: format!("\"cache_salt\":{value}"),
        })
    }
}
