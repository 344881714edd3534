//! Tenants as the configuration lists them: their keys, and everything that is wrong with them. Pure.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::ids::{self, NAME_RULE, is_name};
use crate::limits::TenantLimitsSpec;
use crate::secret::Secret;

/// One tenant as the configuration lists it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TenantSpec {
    /// The tenant's name in logs and metrics: 1 to 64 of `A-Z`, `a-z`, `0-9`, `-`, `_` and `.`.
    pub name: String,
    /// The keys that the tenant's clients send as `authorization: Bearer ...`, at least one unless `jwt` is set: text,
    /// `${NAME}`, `file:/path`, or `sha256:` and the hex digest of the key. A file may have many, one a line; blank lines and those
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
            let digits = ids::hex::<64>(&digest).map(char::from);
            self.cache_salt = Secret::new(String::from_iter(digits));
        }
        self
    }
}

/// The label of tenants beyond those that have series of their own.
const RESERVED: &str = "other";
/// vLLM's own limit.
const SALT_BYTES_MAX: usize = 1_024;
const DIGEST: &str = "sha256:";

/// SHA-256 of a key or a token.
pub(in crate::openai) type KeyDigest = [u8; 32];

/// What is wrong with a list: the place in it, as in `[0].name`, and a message without any key. With `has_tokens` a tenant
/// may have no key.
pub fn check(listed: &[TenantSpec], has_tokens: bool) -> Vec<(String, String)> {
    let mut problems = Vec::new();
    let mut names = BTreeMap::new();
    let mut keys = BTreeMap::new();
    for (place, tenant) in listed.iter().enumerate() {
        let mut wrong =
            |at: String, message: String| problems.push((format!("[{place}]{at}"), message));
        let name = &tenant.name;
        if !is_name(name) {
            wrong(".name".to_owned(), format!("`{name}` {NAME_RULE}"));
        } else if let Some(first) = names.insert(name, place) {
            wrong(
                ".name".to_owned(),
                format!("`{name}` is tenants[{first}] already"),
            );
        }
        if name == RESERVED {
            let message = format!(
                "`{RESERVED}` is what metrics call all tenants that have no series of their own; choose another name"
            );
            wrong(".name".to_owned(), message);
        }
        if let Some(max) = tenant.max_priority.filter(|max| *max < tenant.priority) {
            let priority = tenant.priority;
            let message = format!(
                "is {priority}, above the tenant's `max_priority` of {max}, so that no request could have it; raise \
                 `max_priority`, or write at most {max} here"
            );
            wrong(".priority".to_owned(), message);
        }
        if tenant.keys.is_empty() && !has_tokens {
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

/// Keys that can be guessed: shorter than `bytes_min`, or published as an example. The place of each in the list, and a
/// message.
pub fn check_strength(listed: &[TenantSpec], bytes_min: usize) -> Vec<(String, String)> {
    let mut problems = Vec::new();
    for (place, tenant) in listed.iter().enumerate() {
        for (number, listed) in tenant.keys.iter().enumerate() {
            let is_weak = |key: &str| !key.starts_with(DIGEST) && key.len() < bytes_min;
            let message = match keys_of(listed).find(|(_, key)| is_weak(key) || is_example(key)) {
                None => continue,
                Some((_, key)) if is_example(key) => {
                    "is a key of the examples, which everybody can read; make one with \
                     `openssl rand -hex 32`"
                        .to_owned()
                }
                Some((line, _)) => {
                    let line = line.map(|line| format!("line {line} ")).unwrap_or_default();
                    format!(
                        "{line}has fewer than {bytes_min} characters and can be guessed; make one with `openssl \
                         rand -hex 32`, or listen on 127.0.0.1 (`api.listen`)"
                    )
                }
            };
            problems.push((format!("[{place}].keys[{number}]"), message));
        }
    }
    problems
}

/// Keys that stood in this project's examples.
fn is_example(key: &str) -> bool {
    const EXAMPLES: [&str; 2] = [
        "sk-only-an-example",
        "sha256:f2d4b279b82ad92867af5878fe7482caebdd7b75499868d0362a6e63ff51f046",
    ];
    EXAMPLES.contains(&key)
}

/// Problems that are reported of one file with keys.
const PROBLEMS_MAX: usize = 10;

/// The keys of one entry: itself, or the lines of a file, with their numbers.
pub(super) fn keys_of(listed: &Secret) -> impl Iterator<Item = (Option<usize>, &str)> {
    let text = listed.expose();
    let is_file = text.contains('\n');
    text.split('\n')
        .enumerate()
        .filter_map(move |(index, line)| {
            if is_file {
                let line = line.trim_ascii();
                let is_key = !line.is_empty() && !line.starts_with('#');
                is_key.then_some((Some(index + 1), line))
            } else {
                Some((None, line))
            }
        })
}

pub(super) fn digest(text: &str) -> Result<KeyDigest, &'static str> {
    if let Some(hex) = text.strip_prefix(DIGEST) {
        let digest: Option<KeyDigest> = ids::from_hex(hex).and_then(|bytes| bytes.try_into().ok());
        return digest.ok_or("must be `sha256:` and 64 hex digits");
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
