//! Which tokens are accepted.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::location::Location;
use crate::http::tls::ClientSettings;
use crate::observe::metrics::words;

/// JSON Web Tokens (JWTs) that clients may send instead of an API key, as `authorization: Bearer ...`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Whose tokens are accepted. Each of them is trusted to name any tenant.
    pub issuers: Vec<IssuerSettings>,
    /// The tenant of `tenants` whose limits, priority and name in metrics those share that a token names and `tenants`
    /// does not list. What they store is their own. Empty: their requests are refused with 401.
    pub default_tenant: String,
    /// No keys: what issuers and libraries expect.
    #[serde(skip)]
    pub advanced: Advanced,
}

/// One issuer of tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct IssuerSettings {
    /// The claim `iss` of its tokens, to the letter, such as `https://login.example.com/realms/ai`.
    pub issuer: String,
    /// What the claim `aud` must name, one of these. `"*"`: anything or nothing, also tokens that were issued for other
    /// services.
    pub audiences: Vec<String>,
    /// Its public keys, a JSON Web Key Set: a URL, or the path of a file.
    pub jwks: String,
    /// TLS of the connection to an `https` URL. Left out: with the CA certificates of the operating system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<ClientSettings>,
    /// The algorithms of signatures that are accepted. A key also takes only what its type, its `alg` and its `use`
    /// allow.
    pub algorithms: Vec<Algorithm>,
    /// The claim that names the tenant. One that begins with `/` is the path to a claim inside others (a JSON Pointer,
    /// such as `/kubernetes.io/namespace`).
    pub tenant_claim: String,
}

impl Default for IssuerSettings {
    fn default() -> Self {
        Self {
            issuer: String::new(),
            audiences: Vec::new(),
            jwks: String::new(),
            tls: None,
            algorithms: Algorithm::ALL.to_vec(),
            tenant_claim: "tenant".to_owned(),
        }
    }
}

/// Times and bounds, the same for all issuers.
#[derive(Clone, Debug, PartialEq)]
pub struct Advanced {
    /// How far clocks may be apart: a token is accepted for this long after `exp` and before `nbf`.
    pub leeway: Duration,
    /// Time between two looks at the keys of a URL. Files are looked at every 2 s.
    pub refresh_interval: Duration,
    /// A token whose key is not known makes the router look at once, but not more often than this.
    pub unknown_key_interval: Duration,
    /// How long one look at the keys may take. Requests whose key is not known wait for it.
    pub timeout: Duration,
    /// Verified tokens that are remembered, so that their next requests need no check of the signature. Of more, those
    /// that were not used for longest are forgotten.
    pub max_cached_tokens: u32,
}

impl Default for Advanced {
    fn default() -> Self {
        Self {
            // The usual one of libraries.
            leeway: Duration::from_secs(60),
            // Issuers publish a key for longer than this before they sign with it.
            refresh_interval: Duration::from_secs(10 * 60),
            // A client with made-up keys costs the issuer two looks a minute.
            unknown_key_interval: Duration::from_secs(30),
            // A request waits no longer for an issuer that is down.
            timeout: Duration::from_secs(5),
            // 200 bytes each.
            max_cached_tokens: 10_000,
        }
    }
}

words! {
    /// An algorithm of signatures with a public key. Those with a shared secret (HS256) are none.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
    pub enum Algorithm {
        RS256 = "RS256",
        RS384 = "RS384",
        RS512 = "RS512",
        PS256 = "PS256",
        PS384 = "PS384",
        PS512 = "PS512",
        ES256 = "ES256",
        ES384 = "ES384",
        EdDSA = "EdDSA",
    }
}

/// Each has a task, and labels in metrics.
const MAX_ISSUERS: usize = 64;

impl Settings {
    /// What is wrong beyond types and bounds: keys with a message each.
    pub fn check(&self) -> Vec<(String, String)> {
        let mut problems = Vec::new();
        if self.issuers.is_empty() {
            let message = "lists none, so that no token could be accepted";
            problems.push(("issuers".to_owned(), message.to_owned()));
        }
        if self.issuers.len() > MAX_ISSUERS {
            let message = format!("lists more than {MAX_ISSUERS}");
            problems.push(("issuers".to_owned(), message));
        }
        for (index, issuer) in self.issuers.iter().enumerate() {
            let mut wrong = |key: &str, message: String| {
                problems.push((format!("issuers[{index}].{key}"), message))
            };
            let is_repeated = |other: &IssuerSettings| other.issuer == issuer.issuer;
            if issuer.issuer.is_empty() {
                wrong(
                    "issuer",
                    "is missing: write the `iss` of the tokens".to_owned(),
                );
            } else if self.issuers[..index].iter().any(is_repeated) {
                wrong("issuer", format!("`{}` is listed twice", issuer.issuer));
            }
            if issuer.audiences.is_empty() {
                let message = "is missing: name what the tokens' `aud` must be, or `\"*\"` to accept also tokens that were \
                               issued for other services";
                wrong("audiences", message.to_owned());
            }
            if issuer.algorithms.is_empty() {
                wrong(
                    "algorithms",
                    "lists none; leave it out to accept all".to_owned(),
                );
            }
            if issuer.tenant_claim.is_empty() {
                wrong(
                    "tenant_claim",
                    "is empty: name the claim with the tenant".to_owned(),
                );
            }
            if let Err(error) = issuer.location() {
                wrong("jwks", error);
            }
            let is_https = issuer.jwks.starts_with("https://");
            if issuer.tls.is_some() && !is_https {
                wrong("tls", "is for an `https` URL in `jwks`".to_owned());
            }
        }
        problems
    }
}

impl IssuerSettings {
    /// The file with the issuer's keys, if they are in one.
    pub fn file(&self) -> Option<String> {
        match self.location() {
            Ok(Location::File(path)) => Some(path),
            Ok(Location::Url { .. }) | Err(_) => None,
        }
    }

    pub(super) fn location(&self) -> Result<Location, String> {
        let tls = self.tls.clone().unwrap_or_default();
        Location::of(&self.jwks, tls)
    }
}
