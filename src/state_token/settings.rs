//! The `responses.state_token` section: keys, expiry and size limits.

use serde::{Deserialize, Serialize};

use super::key::Key;
use crate::secret::Secret;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// The first signs; all of them open. Each at least 32 random bytes, as hex or base64.
    pub keys: Vec<Secret>,
    /// How long a carrier can be opened.
    pub expiry_s: u64,
    /// Of a carrier's text. Its client sends it with every request, so it counts against the limit of
    /// a request's body.
    pub bytes_max: u64,
    /// Of the items in it, before compression.
    pub plain_bytes_max: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            keys: Vec::new(),
            // As long as stored responses are kept.
            expiry_s: 30 * 24 * 3_600,
            // A million tokens of text compress to about a megabyte; some images fit as well.
            bytes_max: 4 << 20,
            plain_bytes_max: 16 << 20,
        }
    }
}

/// More are a forgotten rotation; each makes a start slower, none a request.
const KEYS_MAX: usize = 16;
const BYTES_MIN: u64 = 4 << 10;

impl Settings {
    /// With carriers no longer than a request's body may be, in which they come back.
    pub fn within(mut self, body_bytes_max: u64) -> Self {
        self.bytes_max = self.bytes_max.min(body_bytes_max.max(BYTES_MIN));
        self
    }

    /// The keys, or for each thing that is wrong the key below this section and the message.
    pub fn check(&self) -> Result<Vec<Key>, Vec<(String, String)>> {
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
        if self.keys.len() > KEYS_MAX {
            let message = format!("has {} keys; up to {KEYS_MAX} are used", self.keys.len());
            problems.push(("keys".to_owned(), message));
        }
        let ranges = [
            ("expiry_s", self.expiry_s, 60, 10 * 365 * 24 * 3_600),
            ("bytes_max", self.bytes_max, BYTES_MIN, 1 << 30),
            ("plain_bytes_max", self.plain_bytes_max, BYTES_MIN, 1 << 30),
        ];
        for (name, value, min, max) in ranges {
            if !(min..=max).contains(&value) {
                let message = format!("must be from {min} to {max}, not {value}");
                problems.push((name.to_owned(), message));
            }
        }
        if problems.is_empty() {
            Ok(keys)
        } else {
            Err(problems)
        }
    }
}
