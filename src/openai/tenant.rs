//! Whose request it is: the key or token in `authorization: Bearer ...` or `x-api-key: ...` -> a tenant.
//!
//! Only digests of keys are kept. A key is found by its digest, so the time that takes reveals nothing
//! of the keys there are.

mod admitted;
mod spec;
#[cfg(feature = "jwt")]
mod tokens;

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;

use hyper::header::{HeaderName, HeaderValue};
use hyper::{HeaderMap, header};
use prometheus::IntCounterVec;
use rustc_hash::FxHashMap;
use sha2::{Digest, Sha256};

pub use self::admitted::{Admitted, Salt};
use self::spec::{KeyDigest, digest, keys_of};
pub use self::spec::{TenantSpec, check, check_strength};
#[cfg(feature = "jwt")]
use self::tokens::TokenTenants;
use super::error::ApiError;
use crate::ids::Tenant;
use crate::jwt;
use crate::observe::metrics::Registry;
use crate::secret::Secret;

/// The clients that may send requests, of one configuration.
#[derive(Debug)]
pub struct Tenants {
    keys: Keys,
    #[cfg(feature = "jwt")]
    tokens: Option<TokenTenants>,
    verifier: Arc<jwt::Verifier>,
    requests: IntCounterVec,
}

/// A tenant of the configuration, or one that a token names.
#[derive(Clone, Debug)]
pub enum Caller<'a> {
    Listed(&'a Admitted),
    Token(Arc<Admitted>),
}

impl Deref for Caller<'_> {
    type Target = Admitted;

    fn deref(&self) -> &Admitted {
        match self {
            Self::Listed(admitted) => admitted,
            Self::Token(admitted) => admitted,
        }
    }
}

#[derive(Debug)]
enum Keys {
    /// Clients need no key.
    None(Admitted),
    Known(KnownKeys),
}

/// The tenants that are listed.
#[derive(Debug, Default)]
struct KnownKeys {
    /// By the digest of a key.
    by_key: FxHashMap<KeyDigest, Admitted>,
    by_name: HashMap<Arc<str>, Admitted>,
}

impl Tenants {
    /// The tenants of a list that [`check`] finds nothing wrong with; a key that it would complain of is left out. `tokens`
    /// are accepted besides keys, as `verifier` says.
    pub fn new(
        listed: &[TenantSpec],
        tokens: Option<&jwt::Settings>,
        verifier: Arc<jwt::Verifier>,
        registry: &Registry,
    ) -> Self {
        let requests = registry.counters(
            "warmroute_tenant_requests_total",
            "Requests, by the tenant whose key or token they came with (`default` where there are no tenants).",
            &["tenant"],
        );
        Self::counted(listed, tokens, verifier, requests)
    }

    /// The tenants of the next configuration. Their requests count in the same metric as before.
    pub fn successor(
        &self,
        listed: &[TenantSpec],
        tokens: Option<&jwt::Settings>,
    ) -> Result<Self, String> {
        let verifier = self.verifier.successor(tokens)?;
        Ok(Self::counted(
            listed,
            tokens,
            verifier,
            self.requests.clone(),
        ))
    }

    #[cfg_attr(not(feature = "jwt"), expect(unused_variables, reason = "no tokens"))]
    fn counted(
        listed: &[TenantSpec],
        tokens: Option<&jwt::Settings>,
        verifier: Arc<jwt::Verifier>,
        requests: IntCounterVec,
    ) -> Self {
        Self {
            keys: Keys::new(listed, &requests),
            #[cfg(feature = "jwt")]
            tokens: tokens.and_then(|settings| {
                let admitted =
                    |tenant: &TenantSpec| Admitted::of(&tenant.name, &tenant.cache_salt, &requests);
                TokenTenants::new(verifier.clone(), settings, listed, admitted)
            }),
            verifier,
            requests,
        }
    }

    /// Whether requests need a key or a token, which are not forwarded to engines.
    pub fn require_keys(&self) -> bool {
        matches!(self.keys, Keys::Known(_))
    }

    /// The tenant of a request, and counts it. Only a token that was not seen before, and whose key is not known, may
    /// have to wait.
    pub async fn admit(&self, headers: &HeaderMap) -> Result<Caller<'_>, ApiError> {
        let caller = match &self.keys {
            Keys::None(admitted) => Caller::Listed(admitted),
            Keys::Known(known) => {
                let key = key(headers).ok_or_else(ApiError::no_key)?;
                let digest = KeyDigest::from(Sha256::digest(key));
                match known.by_key.get(&digest) {
                    Some(admitted) => Caller::Listed(admitted),
                    None => self.of_token(key, digest).await?,
                }
            }
        };
        caller.requests.inc();
        Ok(caller)
    }

    /// The tenant of this name, whose key or token was seen before: for work that goes on without one. `None` if there
    /// is none any more.
    pub fn of_name(&self, name: &str) -> Option<Caller<'_>> {
        match &self.keys {
            Keys::None(admitted) => (*admitted.name == *name).then_some(Caller::Listed(admitted)),
            Keys::Known(known) => match known.by_name.get(name) {
                Some(admitted) => Some(Caller::Listed(admitted)),
                None => self.of_token_name(name),
            },
        }
    }

    #[cfg(feature = "jwt")]
    fn of_token_name(&self, name: &str) -> Option<Caller<'_>> {
        let named = self.tokens.as_ref()?.named(name)?;
        Some(Caller::Token(named))
    }

    #[cfg(not(feature = "jwt"))]
    fn of_token_name(&self, _: &str) -> Option<Caller<'_>> {
        None
    }

    #[cfg(feature = "jwt")]
    async fn of_token(&self, key: &[u8], digest: KeyDigest) -> Result<Caller<'_>, ApiError> {
        match &self.tokens {
            Some(tokens) if TokenTenants::is_token(key) => {
                tokens.admit(key, digest).await.map(Caller::Token)
            }
            _ => Err(ApiError::unknown_key()),
        }
    }

    #[cfg(not(feature = "jwt"))]
    async fn of_token(&self, _: &[u8], _: KeyDigest) -> Result<Caller<'_>, ApiError> {
        Err(ApiError::unknown_key())
    }
}

impl Keys {
    fn new(listed: &[TenantSpec], requests: &IntCounterVec) -> Self {
        if listed.is_empty() {
            let salt = Secret::default();
            return Self::None(Admitted::of(Tenant::DEFAULT, &salt, requests));
        }
        let mut known = KnownKeys::default();
        for tenant in listed {
            let admitted = Admitted::of(&tenant.name, &tenant.cache_salt, requests);
            let keys = tenant.keys.iter().flat_map(keys_of);
            for digest in keys.filter_map(|(_, key)| digest(key).ok()) {
                known.by_key.insert(digest, admitted.clone());
            }
            known.by_name.insert(admitted.own_name.clone(), admitted);
        }
        Self::Known(known)
    }
}

/// The header in which Anthropic's clients send a key.
pub const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// The `authorization` that means the same as this `x-api-key`.
pub fn as_bearer(key: &HeaderValue) -> Option<HeaderValue> {
    HeaderValue::from_bytes(&[b"Bearer ", key.as_bytes()].concat()).ok()
}

/// The key of a request. If it has both headers, `authorization` counts.
fn key(headers: &HeaderMap) -> Option<&[u8]> {
    if headers.contains_key(header::AUTHORIZATION) {
        return bearer(headers);
    }
    let mut values = headers.get_all(API_KEY).iter();
    let value = values.next().filter(|_| values.next().is_none())?;
    Some(value.as_bytes().trim_ascii()).filter(|key| !key.is_empty())
}

/// The token of the only `authorization` header. Two of them might mean two things to two readers.
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let value = values.next().filter(|_| values.next().is_none())?;
    let (scheme, token) = value.as_bytes().split_at_checked(b"Bearer ".len())?;
    let token = token.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"Bearer ") && !token.is_empty()).then_some(token)
}

#[cfg(test)]
mod tests;
