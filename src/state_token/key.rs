//! One key of the key ring: parsing from the configuration, its id, and the MACs made with it. Pure.

use std::fmt;

use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use base64::{Engine, alphabet};
use hkdf::Hkdf;
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use crate::ids::{self, Tenant};
use crate::secret::Secret;

pub(super) const MAC_BYTES: usize = 32;

/// The digest's length: a longer key would add no security.
const KEY_BYTES_MIN: usize = 32;
const KEY_BYTES_MAX: usize = 1_024;

/// Fewer than one in 10^18 random 32-byte keys has fewer distinct bytes; a typed pattern does.
const DISTINCT_BYTES_MIN: usize = 16;

/// HKDF info of each derived key.
const PURPOSE_MAC: &[u8] = b"warmroute carrier v1 mac\0";
const PURPOSE_ENCRYPTION: &[u8] = b"warmroute state token v1 encryption\0";
const PURPOSE_NONCE: &[u8] = b"warmroute state token v1 nonce\0";

const ID_LENGTH: usize = 8;

/// A key that signs tokens. Keeps only the HKDF state, not the key itself.
#[derive(Clone)]
pub struct Key {
    id: [u8; ID_LENGTH],
    derive: Hkdf<Sha256>,
}

/// Shows the id, which is in every token.
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.id())
    }
}

impl Key {
    /// Parses hex, or base64 in either alphabet, padded or not. The error does not show the key.
    pub fn parse(secret: &Secret) -> Result<Self, &'static str> {
        let text = secret.expose().trim();
        if text.is_empty() {
            return Err("is empty");
        }
        let bytes = if text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            ids::from_hex(text)
                .ok_or("has an odd number of hex digits; make one with `openssl rand -hex 32`")?
        } else {
            from_base64(text)
                .ok_or("is neither hex nor base64; make one with `openssl rand -hex 32`")?
        };
        if bytes.len() < KEY_BYTES_MIN {
            return Err("is shorter than 32 bytes; make one with `openssl rand -hex 32`");
        }
        if bytes.len() > KEY_BYTES_MAX {
            return Err("is longer than 1024 bytes");
        }
        let mut seen = [false; 256];
        bytes
            .iter()
            .for_each(|byte| seen[usize::from(*byte)] = true);
        if seen.iter().filter(|seen| **seen).count() < DISTINCT_BYTES_MIN {
            return Err(
                "is not random: it has few different bytes; make one with `openssl rand -hex 32`",
            );
        }
        Ok(Self::new(&bytes))
    }

    pub(super) fn new(bytes: &[u8]) -> Self {
        let id = ids::hex(&Sha256::digest(bytes));
        Self {
            id,
            derive: Hkdf::new(Some(&id), bytes),
        }
    }

    /// The first 8 hex digits of the key's SHA-256.
    pub fn id(&self) -> &str {
        std::str::from_utf8(&self.id).expect("made of ASCII")
    }

    pub(super) fn mac(&self, tenant: Tenant, text: &[u8]) -> [u8; MAC_BYTES] {
        self.digest(tenant, text).finalize().into_bytes().into()
    }

    /// Compares in constant time.
    pub(super) fn verifies(&self, tenant: Tenant, text: &[u8], mac: &[u8; MAC_BYTES]) -> bool {
        self.digest(tenant, text).verify_slice(mac).is_ok()
    }

    /// The key that encrypts this tenant's bodies.
    pub(super) fn encryption_key(&self, tenant: Tenant) -> [u8; 32] {
        self.derived(PURPOSE_ENCRYPTION, tenant)
    }

    /// A nonce for exactly this header and body.
    pub(super) fn nonce<const BYTES: usize>(
        &self,
        tenant: Tenant,
        header: &[u8],
        body: &[u8],
    ) -> [u8; BYTES] {
        let mut digest = hmac(&self.derived(PURPOSE_NONCE, tenant));
        // With its length, so that no byte can belong to the header or to the body.
        digest.update(&(header.len() as u64).to_le_bytes());
        digest.update(header);
        digest.update(body);
        let mac: [u8; MAC_BYTES] = digest.finalize().into_bytes().into();
        *mac.first_chunk().expect("a MAC is longer than a nonce")
    }

    fn digest(&self, tenant: Tenant, text: &[u8]) -> Hmac<Sha256> {
        let mut digest = hmac(&self.derived(PURPOSE_MAC, tenant));
        digest.update(text);
        digest
    }

    fn derived(&self, purpose: &[u8], tenant: Tenant) -> [u8; 32] {
        let mut key = [0; 32];
        self.derive
            .expand_multi_info(&[purpose, tenant.as_str().as_bytes()], &mut key)
            .expect("32 bytes can be derived");
        key
    }
}

fn hmac(key: &[u8]) -> Hmac<Sha256> {
    Hmac::<Sha256>::new_from_slice(key).expect("a key of any length makes an HMAC")
}

fn from_base64(text: &str) -> Option<Vec<u8>> {
    let config =
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let decode = |alphabet| GeneralPurpose::new(alphabet, config).decode(text).ok();
    decode(&alphabet::STANDARD).or_else(|| decode(&alphabet::URL_SAFE))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: Result<&str, &str>) {
        let key = Key::parse(&Secret::new(text));
        match (key, expected) {
            (Ok(key), Ok(id)) => assert_eq!(key.id(), id, "{text}"),
            (Err(why), Err(part)) => assert!(why.contains(part), "{text}: {why}"),
            (found, _) => panic!("{text}: {found:?}, not {expected:?}"),
        }
    }

    #[test]
    fn a_key_is_hex_or_base64_and_named_by_its_digest() {
        // 32 bytes from 0xe0 to 0xff.
        check(
            "e0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff",
            Ok("9432c1a7"),
        );
        check(
            "E0E1E2E3E4E5E6E7E8E9EAEBECEDEEEFF0F1F2F3F4F5F6F7F8F9FAFBFCFDFEFF\n",
            Ok("9432c1a7"),
        );
        check(
            "4OHi4+Tl5ufo6err7O3u7/Dx8vP09fb3+Pn6+/z9/v8=",
            Ok("9432c1a7"),
        );
        check(
            "4OHi4-Tl5ufo6err7O3u7_Dx8vP09fb3-Pn6-_z9_v8",
            Ok("9432c1a7"),
        );
    }

    #[test]
    fn a_weak_key_is_refused() {
        check("", Err("empty"));
        check(" ", Err("empty"));
        check("c2hvcnQ=", Err("shorter"));
        check("not a key at all", Err("neither"));
        check(&"0".repeat(64), Err("not random"));
        check(&"0123456789abcdef".repeat(8), Err("not random"));
        check(
            "e0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfe",
            Err("shorter"),
        );
        check(
            "e0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfef",
            Err("odd"),
        );
        check(&"ab".repeat(2_000), Err("longer"));
    }

    #[test]
    fn debug_output_shows_only_the_id() {
        let secret = "e0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff";
        let key = Key::parse(&Secret::new(secret)).unwrap();
        assert_eq!(format!("{key:?}"), "9432c1a7");
    }
}
