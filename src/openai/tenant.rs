//! Whose request it is: the key in `authorization: Bearer ...` -> a tenant.
//!
//! Only digests of keys are kept. A key is found by its digest, so the time that takes reveals nothing
//! of the keys there are.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;

use hyper::{HeaderMap, header};
use prometheus::{IntCounter, IntCounterVec};
use rustc_hash::FxHashMap;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::error::ApiError;
use crate::ids::Tenant;
use crate::limits::TenantLimitsSpec;
use crate::observe::metrics::Registry;
use crate::secret::Secret;

/// One tenant as the configuration lists it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TenantSpec {
    /// The tenant's name in logs and metrics: 1 to 64 of `A-Z`, `a-z`, `0-9`, `-`, `_` and `.`.
    pub name: String,
    /// The keys that the tenant's clients send as `authorization: Bearer ...`, at least one: text, `${NAME}`,
    /// `file:/path`, or `sha256:` and the hex digest of the key. A file may have many, one a line; blank lines and those
    /// that begin with `#` are none. Workers do not get them, but their own `api_key`.
    #[serde(default)]
    pub keys: Vec<Secret>,
    /// Added as `cache_salt` to the body of requests that generate, so that workers share no cached prefix with
    /// other tenants, who could otherwise find out by timing what this tenant asked. Empty: none.
    #[serde(default)]
    pub cache_salt: Secret,
    /// The priority of its requests while they wait in the router (`queue`); higher is earlier. A request may ask for a
    /// lower one.
    #[serde(default)]
    pub priority: i32,
    /// The highest priority that its requests may ask for. Left out: `priority`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_priority: Option<i32>,
    /// What the tenant may use. Left out: anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<TenantLimitsSpec>,
}

impl TenantSpec {
    /// The tenant with a salt made of its name and `key`, unless it has one or the key is empty.
    #[must_use]
    pub fn salted(mut self, key: &Secret) -> Self {
        if self.cache_salt.is_empty() && !key.is_empty() {
            // A key of a fixed length at the start: no two pairs of key and name are hashed as the same bytes.
            let digest = Sha256::new()
                .chain_update("warmroute cache salt v1\0")
                .chain_update(Sha256::digest(key.expose()))
                .chain_update(&self.name)
                .finalize();
            let hex = digest.iter().fold(String::new(), |mut hex, byte| {
                let _ = write!(hex, "{byte:02x}");
                hex
            });
            self.cache_salt = Secret::new(hex);
        }
        self
    }
}

const NAME_BYTES_MAX: usize = 64;
/// vLLM's own limit.
const SALT_BYTES_MAX: usize = 1_024;
const DIGEST: &str = "sha256:";

type KeyDigest = [u8; 32];

/// What is wrong with a list: the place in it, as in `[0].name`, and a message without any key.
pub fn check(listed: &[TenantSpec]) -> Vec<(String, String)> {
    let mut problems = Vec::new();
    let mut names = BTreeMap::new();
    let mut keys = BTreeMap::new();
    for (place, tenant) in listed.iter().enumerate() {
        let mut wrong =
            |at: String, message: String| problems.push((format!("[{place}]{at}"), message));
        let name = &tenant.name;
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.bytes().all(is_plain) {
            let message = format!(
                "`{name}` must be 1 to {NAME_BYTES_MAX} of A-Z, a-z, 0-9, `-`, `_` and `.`"
            );
            wrong(".name".to_owned(), message);
        } else if let Some(first) = names.insert(name, place) {
            wrong(
                ".name".to_owned(),
                format!("`{name}` is tenants[{first}] already"),
            );
        }
        if tenant.keys.is_empty() {
            wrong(
                ".keys".to_owned(),
                "has none, so no client could use it".to_owned(),
            );
        }
        for (number, listed) in tenant.keys.iter().enumerate() {
            let at = format!(".keys[{number}]");
            let mut problems = 0;
            for (line, key) in keys_of(listed) {
                let message = match digest(key) {
                    Err(why) => why.to_owned(),
                    Ok(digest) => match keys.insert(digest, place) {
                        Some(first) => format!("is a key of tenants[{first}] already"),
                        None => continue,
                    },
                };
                problems += 1;
                let message = match line {
                    None => message,
                    Some(_) if problems > PROBLEMS_MAX => break,
                    Some(line) => format!("line {line} {message}"),
                };
                wrong(at.clone(), message);
            }
            if keys_of(listed).next().is_none() {
                wrong(at, "has no key, only blank lines and comments".to_owned());
            }
        }
        for (key, message) in tenant.limits.iter().flat_map(TenantLimitsSpec::check) {
            wrong(format!(".limits.{key}"), message);
        }
        if tenant.cache_salt.expose().len() > SALT_BYTES_MAX {
            let message = format!("must have up to {SALT_BYTES_MAX} bytes");
            wrong(".cache_salt".to_owned(), message);
        }
    }
    problems
}

/// Problems that are reported of one file with keys.
const PROBLEMS_MAX: usize = 10;

/// The keys of one entry: itself, or the lines of a file, with their numbers.
fn keys_of(listed: &Secret) -> impl Iterator<Item = (Option<usize>, &str)> {
    let text = listed.expose();
    let is_file = text.contains('\n');
    text.split('\n')
        .enumerate()
        .filter_map(move |(index, line)| match is_file {
            false => Some((None, line)),
            true => {
                let line = line.trim_ascii();
                let is_key = !line.is_empty() && !line.starts_with('#');
                is_key.then_some((Some(index + 1), line))
            }
        })
}

fn digest(text: &str) -> Result<KeyDigest, &'static str> {
    if let Some(hex) = text.strip_prefix(DIGEST) {
        return from_hex(hex).ok_or("must be `sha256:` and 64 hex digits");
    }
    if text.is_empty() {
        return Err("is empty");
    }
    // What no header could carry, and a blank at an end, which a header would lose.
    if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err("has characters that no bearer token can have");
    }
    Ok(Sha256::digest(text).into())
}

fn from_hex(text: &str) -> Option<KeyDigest> {
    let mut digest = [0; 32];
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if pairs.len() != digest.len() || !rest.is_empty() {
        return None;
    }
    for (byte, [high, low]) in digest.iter_mut().zip(pairs) {
        let digit = |of: u8| char::from(of).to_digit(16);
        *byte = u8::try_from(digit(*high)? << 4 | digit(*low)?).ok()?;
    }
    Some(digest)
}

/// The tenant of a request whose key is valid.
#[derive(Clone, Debug)]
pub struct Admitted {
    pub tenant: Tenant,
    pub name: Arc<str>,
    /// `cache_salt` for engines, as JSON.
    pub cache_salt: Option<Arc<Salt>>,
    requests: IntCounter,
}

/// A salt as the field of a body.
#[derive(Debug, PartialEq)]
pub struct Salt {
    /// `"cache_salt":"..."`.
    pub field: String,
}

/// The clients that may send requests, of one configuration.
#[derive(Debug)]
pub struct Tenants {
    keys: Keys,
    requests: IntCounterVec,
}

#[derive(Debug)]
enum Keys {
    /// Clients need no key.
    None(Admitted),
    /// By the digest of a key.
    Known(FxHashMap<KeyDigest, Admitted>),
}

impl Tenants {
    /// Of a list that [`check`] finds nothing wrong with; a key that it would complain of is left out.
    pub fn new(listed: &[TenantSpec], registry: &Registry) -> Self {
        let requests = registry.counters(
            "warmroute_tenant_requests_total",
            "Requests, by the tenant whose key they came with (`default` where there are no tenants).",
            &["tenant"],
        );
        Self::counted(listed, requests)
    }

    /// Those of the next configuration.
    pub fn successor(&self, listed: &[TenantSpec]) -> Self {
        Self::counted(listed, self.requests.clone())
    }

    fn counted(listed: &[TenantSpec], requests: IntCounterVec) -> Self {
        let keys = Keys::new(listed, &requests);
        Self { keys, requests }
    }

    /// Whether requests need a key. Keys are not forwarded to engines.
    pub fn require_keys(&self) -> bool {
        matches!(self.keys, Keys::Known(_))
    }

    /// The tenant of a request, and counts it.
    pub fn admit(&self, headers: &HeaderMap) -> Result<&Admitted, ApiError> {
        let admitted = match &self.keys {
            Keys::None(admitted) => admitted,
            Keys::Known(known) => {
                let key = bearer(headers).ok_or_else(ApiError::no_key)?;
                known
                    .get(&KeyDigest::from(Sha256::digest(key)))
                    .ok_or_else(ApiError::unknown_key)?
            }
        };
        admitted.requests.inc();
        Ok(admitted)
    }
}

impl Keys {
    fn new(listed: &[TenantSpec], requests: &IntCounterVec) -> Self {
        let admitted = |name: &str, salt: &Secret| Admitted {
            tenant: Tenant::of(name),
            name: name.into(),
            cache_salt: Salt::of(salt).map(Arc::new),
            requests: requests.with_label_values(&[name]),
        };
        if listed.is_empty() {
            return Self::None(admitted(Tenant::DEFAULT, &Secret::default()));
        }
        let mut known = FxHashMap::default();
        for tenant in listed {
            let admitted = admitted(&tenant.name, &tenant.cache_salt);
            let keys = tenant.keys.iter().flat_map(keys_of);
            for digest in keys.filter_map(|(_, key)| digest(key).ok()) {
                known.insert(digest, admitted.clone());
            }
        }
        Self::Known(known)
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

/// The token of the only `authorization` header. Two of them might mean two things to two readers.
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let value = values.next().filter(|_| values.next().is_none())?;
    let (scheme, token) = value.as_bytes().split_at_checked(b"Bearer ".len())?;
    let token = token.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"Bearer ") && !token.is_empty()).then_some(token)
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    fn tenant(name: &str, keys: &[&str]) -> TenantSpec {
        TenantSpec {
            name: name.to_owned(),
            keys: keys.iter().copied().map(Secret::new).collect(),
            ..TenantSpec::default()
        }
    }

    /// SHA-256 of `sk-example`.
    const DIGESTED: &str =
        "sha256:f2d4b279b82ad92867af5878fe7482caebdd7b75499868d0362a6e63ff51f046";

    fn check_bearer(lines: &[&str], expected: Option<&str>) {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(header::AUTHORIZATION, HeaderValue::from_str(line).unwrap());
        }
        assert_eq!(bearer(&headers), expected.map(str::as_bytes), "{lines:?}");
    }

    #[test]
    fn a_key_is_the_one_bearer_token() {
        check_bearer(&[], None);
        check_bearer(&["Bearer k"], Some("k"));
        check_bearer(&["bearer   k "], Some("k"));
        check_bearer(&["Bearer"], None);
        check_bearer(&["Bearer  "], None);
        check_bearer(&["Bearerk"], None);
        check_bearer(&["Basic azpr"], None);
        check_bearer(&["Bearer k", "Bearer k"], None);
    }

    #[test]
    fn a_request_is_its_keys_tenant_and_counted() {
        let registry = Registry::default();
        let listed = [tenant("a", &["sk-a", DIGESTED]), tenant("b", &["sk-b"])];
        assert_eq!(check(&listed), []);
        let tenants = Tenants::new(&listed, &registry);
        let of = |key: &str| {
            let mut headers = HeaderMap::new();
            let value = HeaderValue::from_str(&format!("Bearer {key}")).unwrap();
            headers.insert(header::AUTHORIZATION, value);
            tenants
                .admit(&headers)
                .map(|admitted| admitted.tenant)
                .map_err(|error| error.code)
        };
        assert_eq!(of("sk-a").unwrap(), Tenant::of("a"));
        assert_eq!(of("sk-example").unwrap(), Tenant::of("a"));
        assert_eq!(of("sk-b").unwrap(), Tenant::of("b"));
        for wrong in ["sk-", "sk-c", "SK-A", DIGESTED, "sk-a\u{e9}"] {
            assert_eq!(of(wrong), Err("invalid_api_key"), "{wrong}");
        }
        assert!(tenants.require_keys());
        let page = registry.text();
        assert!(
            page.contains("warmroute_tenant_requests_total{tenant=\"a\"} 2"),
            "{page}"
        );
    }

    #[test]
    fn a_file_may_have_many_keys() {
        let mut file = format!("# of team a\n\nsk-first\r\n  {DIGESTED}\n");
        file.extend((0..10_000).map(|number| format!("sk-{number}\n")));
        let listed = [tenant("a", &[&file, "sk-single"]), tenant("b", &["sk-b"])];
        assert_eq!(check(&listed), []);
        let tenants = Tenants::new(&listed, &Registry::default());
        for key in ["sk-first", "sk-example", "sk-9999", "sk-single"] {
            let mut headers = HeaderMap::new();
            let value = HeaderValue::from_str(&format!("Bearer {key}")).unwrap();
            headers.insert(header::AUTHORIZATION, value);
            assert_eq!(
                tenants.admit(&headers).unwrap().tenant,
                Tenant::of("a"),
                "{key}"
            );
        }
        let wrong = check(&[tenant("a", &["sk-1\nsk 2\nsk-1\n", "#\n"])]);
        let messages: Vec<&str> = wrong.iter().map(|(_, message)| &**message).collect();
        let expected = [
            "line 2 has characters that no bearer token can have",
            "line 3 is a key of tenants[0] already",
            "has no key, only blank lines and comments",
        ];
        assert_eq!(messages, expected);
    }

    #[test]
    fn one_key_gives_each_tenant_a_salt_of_its_own() {
        let key = Secret::new("0123456789abcdef");
        let salt = |name: &str, key: &Secret| tenant(name, &["k"]).salted(key).cache_salt;
        assert_ne!(salt("a", &key), salt("b", &key));
        assert_eq!(salt("a", &key), salt("a", &key));
        assert_ne!(
            salt("a", &key),
            salt("a", &Secret::new("another key of 16"))
        );
        assert!(salt("a", &Secret::default()).is_empty());
        let own = TenantSpec {
            cache_salt: Secret::new("own"),
            ..tenant("a", &["k"])
        };
        assert_eq!(own.salted(&key).cache_salt, Secret::new("own"));
    }

    #[test]
    fn without_tenants_everybody_is_one() {
        let tenants = Tenants::new(&[], &Registry::default());
        let admitted = tenants.admit(&HeaderMap::new()).unwrap();
        assert_eq!(admitted.tenant, Tenant::default());
        assert_eq!(admitted.cache_salt, None);
        assert!(!tenants.require_keys());
    }

    #[test]
    fn all_that_is_wrong_with_a_list_is_told_without_its_keys() {
        let listed = [
            tenant("a b", &["x"]),
            tenant("c", &[]),
            tenant("c", &["", "two words", "sha256:12", "x"]),
            TenantSpec {
                cache_salt: Secret::new("s".repeat(1_025)),
                ..tenant("d", &["y", "y"])
            },
        ];
        let problems = check(&listed);
        let places: Vec<&str> = problems.iter().map(|(place, _)| &**place).collect();
        let expected = [
            "[0].name",
            "[1].keys",
            "[2].name",
            "[2].keys[0]",
            "[2].keys[1]",
            "[2].keys[2]",
            "[2].keys[3]",
            "[3].keys[1]",
            "[3].cache_salt",
        ];
        assert_eq!(places, expected);
        assert!(
            problems
                .iter()
                .all(|(_, message)| !message.contains("two words"))
        );
    }
}
