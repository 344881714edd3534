//! Encryption of a token's body: XChaCha20-Poly1305, under a key of its own for each tenant. Pure.
//!
//! The nonce is a MAC of everything that is encrypted and of the header beside it, so no randomness is needed, and no
//! nonce is used for two different bodies: a collision of 192 bits aside, the same nonce means the same token.

use chacha20poly1305::aead::AeadInOut;
use chacha20poly1305::{KeyInit, XChaCha20Poly1305, XNonce};
use serde::{Deserialize, Serialize};

use super::key::Key;
use super::rejection::RejectReason;
use crate::ids::Tenant;

const NONCE_BYTES: usize = 24;

/// What the header's `enc` says of the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Encryption {
    /// Whoever holds the token can read it.
    #[serde(rename = "none")]
    None,
    /// A nonce of 24 bytes, the encrypted body, and a tag of 16 bytes.
    #[serde(rename = "XC20P")]
    XChaCha20Poly1305,
}

/// Encrypts a body. `header`: its header as JSON.
pub(super) fn encrypt(key: &Key, tenant: Tenant, header: &[u8], mut body: Vec<u8>) -> Vec<u8> {
    let nonce: [u8; NONCE_BYTES] = key.nonce(tenant, header, &body);
    let cipher = XChaCha20Poly1305::new(&key.encryption_key(tenant).into());
    cipher
        .encrypt_in_place(&XNonce::from(nonce), header, &mut body)
        .expect("a body is far shorter than the cipher's limit of 256 GiB");
    [&nonce[..], &body].concat()
}

/// Decrypts a body. Its token's MAC was right, so a failure means that no release of the router wrote it.
pub(super) fn decrypt(
    key: &Key,
    tenant: Tenant,
    header: &[u8],
    mut body: Vec<u8>,
) -> Result<Vec<u8>, RejectReason> {
    let nonce: [u8; NONCE_BYTES] = *body.first_chunk().ok_or(RejectReason::Unreadable)?;
    body.drain(..NONCE_BYTES);
    let cipher = XChaCha20Poly1305::new(&key.encryption_key(tenant).into());
    cipher
        .decrypt_in_place(&XNonce::from(nonce), header, &mut body)
        .map_err(|_| RejectReason::Unreadable)?;
    Ok(body)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key() -> Key {
        Key::new(&[7; 32])
    }

    proptest! {
        #[test]
        fn what_was_encrypted_is_decrypted_and_nothing_else(
            body: Vec<u8>, header: Vec<u8>, at: prop::sample::Index, bit in 0..8u8,
        ) {
            let tenant = Tenant::of("a");
            let encrypted = encrypt(&key(), tenant, &header, body.clone());
            prop_assert_eq!(decrypt(&key(), tenant, &header, encrypted.clone()), Ok(body));
            let mut changed = encrypted.clone();
            changed[at.index(encrypted.len())] ^= 1 << bit;
            prop_assert!(decrypt(&key(), tenant, &header, changed).is_err());
            let mut other = header.clone();
            other.push(b'x');
            prop_assert!(decrypt(&key(), tenant, &other, encrypted.clone()).is_err());
            prop_assert!(decrypt(&key(), Tenant::of("b"), &header, encrypted.clone()).is_err());
            let mut cut = encrypted;
            cut.pop();
            prop_assert!(decrypt(&key(), tenant, &header, cut).is_err());
        }
    }

    #[test]
    fn other_content_has_another_nonce() {
        let nonce = |header: &[u8], body: &[u8]| {
            encrypt(&key(), Tenant::of("a"), header, body.to_vec())[..NONCE_BYTES].to_vec()
        };
        assert_eq!(nonce(b"h", b"body"), nonce(b"h", b"body"));
        assert_ne!(nonce(b"h", b"body"), nonce(b"h", b"bodz"));
        assert_ne!(nonce(b"h", b"body"), nonce(b"hb", b"ody"));
    }
}
