//! Signatures of Standard Webhooks: HMAC-SHA256 over id, time and body. Pure.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use crate::secret::Secret;

/// What a secret begins with whose rest is the base64 of a key.
const PREFIX: &str = "whsec_";
/// Standard Webhooks' bounds of a key.
const KEY_BYTES: std::ops::RangeInclusive<usize> = 24..=64;
/// A text without prefix is the key itself, and says less with each byte.
const TEXT_BYTES: std::ops::RangeInclusive<usize> = 24..=256;

#[derive(Clone)]
pub(super) struct SigningKey(Vec<u8>);

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SigningKey").finish_non_exhaustive()
    }
}

impl SigningKey {
    pub(super) fn of(secret: &Secret) -> Result<Self, String> {
        let text = secret.expose();
        let (key, bounds) = match text.strip_prefix(PREFIX) {
            Some(encoded) => {
                let decoded = STANDARD.decode(encoded).map_err(|_| {
                    "is no base64 after `whsec_`; make one with `echo whsec_$(openssl rand -base64 32)`"
                        .to_owned()
                })?;
                (decoded, KEY_BYTES)
            }
            None => (text.as_bytes().to_vec(), TEXT_BYTES),
        };
        if !bounds.contains(&key.len()) {
            return Err(format!(
                "has {} bytes; it must have {} to {}: make one with `echo whsec_$(openssl rand -base64 32)`",
                key.len(),
                bounds.start(),
                bounds.end()
            ));
        }
        Ok(Self(key))
    }

    fn sign(&self, id: &str, timestamp: i64, body: &[u8]) -> String {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        mac.update(format!("{id}.{timestamp}.").as_bytes());
        mac.update(body);
        format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()))
    }
}

/// The value of `webhook-signature`: a signature by each key.
pub(super) fn signatures(keys: &[SigningKey], id: &str, timestamp: i64, body: &[u8]) -> String {
    let signed = keys.iter().map(|key| key.sign(id, timestamp, body));
    signed.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of the Standard Webhooks libraries.
    #[test]
    fn the_signature_is_that_of_standard_webhooks() {
        let key = SigningKey::of(&Secret::new("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")).unwrap();
        let body = br#"{"test": 2432232314}"#;
        let (id, timestamp) = ("msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330);
        let expected = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";
        assert_eq!(
            signatures(std::slice::from_ref(&key), id, timestamp, body),
            expected
        );
        let raw = SigningKey::of(&Secret::new("a text that is the key itself")).unwrap();
        let both = signatures(&[key.clone(), raw.clone()], id, timestamp, body);
        let parts: Vec<&str> = both.split(' ').collect();
        assert_eq!(parts[0], expected);
        assert_eq!(parts[1], raw.sign(id, timestamp, body));
        assert_ne!(key.sign(id, timestamp + 1, body), expected);
        assert_ne!(key.sign(id, timestamp, b"{}"), expected);
    }

    #[test]
    fn a_short_key_is_refused() {
        for wrong in ["", "short", "whsec_", "whsec_c2hvcnQ=", "whsec_%%%"] {
            assert!(SigningKey::of(&Secret::new(wrong)).is_err(), "{wrong}");
        }
        let long = format!("whsec_{}", STANDARD.encode([7; 65]));
        assert!(SigningKey::of(&Secret::new(long)).is_err());
    }
}
