//! Whose request it is that came with a JSON Web Token: the tenant that the token names. Verified tokens are known by
//! their digest.

use std::collections::HashMap;
use std::sync::Arc;

use super::admitted::Admitted;
use super::spec::{KeyDigest, TenantSpec};
use crate::ids::Tenant;
use crate::jwt::{Cache, Rejection, Settings, Verifier};
use crate::observe;
use crate::openai::error::ApiError;

/// The tenants of tokens, of one configuration.
#[derive(Debug)]
pub(super) struct TokenTenants {
    verifier: Arc<Verifier>,
    known: Cache<Arc<Admitted>>,
    listed: HashMap<String, Arc<Admitted>>,
    /// What those share that are not listed.
    default: Option<(TenantSpec, Arc<Admitted>)>,
}

impl TokenTenants {
    /// `None` if no tokens are accepted.
    pub(super) fn new(
        verifier: Arc<Verifier>,
        settings: &Settings,
        listed: &[TenantSpec],
        admitted: impl Fn(&TenantSpec) -> Admitted,
    ) -> Option<Self> {
        let default = listed
            .iter()
            .find(|tenant| tenant.name == settings.default_tenant);
        verifier.is_on().then(|| Self {
            verifier,
            known: Cache::new(settings.advanced.max_cached_tokens),
            default: default.map(|tenant| (tenant.clone(), Arc::new(admitted(tenant)))),
            listed: listed
                .iter()
                .map(|tenant| (tenant.name.clone(), Arc::new(admitted(tenant))))
                .collect(),
        })
    }

    /// Whether a text looks like a token, and not like a wrong API key.
    pub(super) fn is_token(text: &[u8]) -> bool {
        text.iter().filter(|byte| **byte == b'.').count() == 2
    }

    pub(super) async fn admit(
        &self,
        token: &[u8],
        digest: KeyDigest,
    ) -> Result<Arc<Admitted>, ApiError> {
        let generation = |issuer| self.verifier.generation(issuer);
        if let Some(known) = self.known.get(&digest, observe::now(), generation) {
            return Ok(known);
        }
        let token = str::from_utf8(token).map_err(|_| ApiError::token(&Rejection::Malformed))?;
        let verified = self.verifier.verify(token).await;
        let verified = verified.map_err(|rejection| ApiError::token(&rejection))?;
        let admitted = self.named(&verified.tenant).ok_or_else(|| {
            ApiError::token(&Rejection::Tenant {
                claim: verified.claim,
            })
        })?;
        self.known
            .put(digest, admitted.clone(), verified.expires, verified.by);
        Ok(admitted)
    }

    /// The tenant that a token could name so.
    pub(super) fn named(&self, name: &str) -> Option<Arc<Admitted>> {
        if let Some(listed) = self.listed.get(name) {
            return Some(listed.clone());
        }
        let (spec, shared) = self.default.as_ref()?;
        // What was stored before there were tenants is of no token.
        if name == Tenant::DEFAULT {
            return None;
        }
        // Stored data and prefix caches are its own.
        let salted = TenantSpec {
            name: name.to_owned(),
            ..TenantSpec::default()
        };
        let salted = salted.salted(&spec.cache_salt);
        Some(Arc::new(shared.for_unlisted(&salted)))
    }
}
