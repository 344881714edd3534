//! The `responses.state_token` section: keys, expiry and size limits.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::key::Key;
use crate::secret::Secret;
use crate::units::{DurationText, SizeText};

/// State tokens: with `store: false` and `include: ["reasoning.encrypted_content"]` a client keeps a conversation's
/// state itself, in an encrypted and signed item of each response.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// The first key signs, all of them verify. Each is at least 32 random bytes as hex or base64 (`openssl rand
    /// -hex 32`); text, `${NAME}` or `file:/path`. To rotate: add the new key as the last one on all replicas,
    /// then move it to the front, then drop the old one after `expiry`. A router without Redis makes a key up
    /// if there is none, and its tokens end with its process; with `responses.store.redis` a key is needed, so that
    /// restarted and other replicas can verify state tokens.
    pub keys: Vec<Secret>,
    /// Whether the state is encrypted, so that its holder cannot read it, or only signed. Either kind is accepted. A
    /// release before 0.3 reads only signed ones: when such replicas are replaced one by one, turn this on afterwards.
    pub encrypt: bool,
    /// A state token is valid for this long.
    #[serde(with = "DurationText")]
    #[schemars(extend("min" = "60s", "max" = "3650d"))]
    pub expiry: Duration,
    /// Size of a state token as text. It is part of the next request's body, so `api.max_body` bounds it too.
    #[serde(with = "SizeText")]
    #[schemars(extend("min" = "4KiB", "max" = "1GiB"))]
    pub max_size: u64,
    /// Size of the state in a token before compression.
    #[serde(with = "SizeText")]
    #[schemars(extend("min" = "4KiB", "max" = "1GiB"))]
    pub max_plain_size: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            keys: Vec::new(),
            // The API calls the member `encrypted_content`.
            encrypt: true,
            // As long as stored responses are kept.
            expiry: Duration::from_secs(30 * 24 * 3_600),
            // A million tokens of text compress to about a megabyte; some images fit as well.
            max_size: 4 << 20,
            max_plain_size: 16 << 20,
        }
    }
}

/// More are a forgotten rotation; each makes a start slower, none a request.
const MAX_KEYS: usize = 16;
const MIN_SIZE: u64 = 4 << 10;

impl Settings {
    /// The longest token where a request's body, in which tokens come back, may be this long.
    pub(super) fn max_size_within(&self, max_body: u64) -> u64 {
        self.max_size.min(max_body.max(MIN_SIZE))
    }

    /// What is wrong beyond types and bounds: keys with a message each.
    pub fn check(&self) -> Vec<(String, String)> {
        self.parse_keys().err().unwrap_or_default()
    }

    /// The keys, or what is wrong with them.
    pub(super) fn parse_keys(&self) -> Result<Vec<Key>, Vec<(String, String)>> {
        let mut problems = Vec::new();
        let mut keys: Vec<Key> = Vec::new();
        for (index, secret) in self.keys.iter().enumerate() {
            let at = format!("keys[{index}]");
            match Key::parse(secret) {
                Ok(key) => match keys.iter().position(|other| other.id() == key.id()) {
                    Some(_) => problems.push((at, "is listed twice".to_owned())),
                    None => keys.push(key),
                },
                Err(why) => problems.push((at, why.to_owned())),
            }
        }
        if self.keys.len() > MAX_KEYS {
            let message = format!("has {} keys; up to {MAX_KEYS} are used", self.keys.len());
            problems.push(("keys".to_owned(), message));
        }
        if problems.is_empty() {
            Ok(keys)
        } else {
            Err(problems)
        }
    }
}
