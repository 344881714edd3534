//! A JSON Web Key Set -> the keys in it that can verify signatures. Pure, but for the check of a file.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};

use jsonwebtoken::DecodingKey;
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyOperations, PublicKeyUse};
use serde::Deserialize;
use serde_json::Value;

use super::settings::Algorithm;

/// Issuers have two or three. More would be tried in vain for tokens that name none.
const MAX_KEYS: usize = 100;

/// A file or an answer that is larger is no key set.
pub(super) const MAX_BYTES: usize = 1 << 20;

/// The keys of one issuer.
#[derive(Debug)]
pub(super) struct KeySet {
    keys: Vec<Key>,
    /// Distinguishes it from all others of this process.
    pub(super) generation: u64,
}

/// A key that can verify signatures.
#[derive(Debug)]
pub(super) struct Key {
    id: Option<String>,
    /// What its type allows, or the one that it names.
    algorithms: Vec<Algorithm>,
    pub(super) key: DecodingKey,
}

#[derive(Deserialize)]
struct Listed {
    keys: Vec<Value>,
}

impl KeySet {
    pub(super) fn parse(text: &[u8]) -> Result<Self, String> {
        static GENERATIONS: AtomicU64 = AtomicU64::new(1);
        let listed: Listed = serde_json::from_slice(text)
            .map_err(|error| format!("is no JSON Web Key Set (`{{\"keys\": [...]}}`): {error}"))?;
        let count = listed.keys.len();
        if count > MAX_KEYS {
            return Err(format!("has {count} keys; up to {MAX_KEYS} are read"));
        }
        let keys: Vec<Key> = listed.keys.into_iter().filter_map(Key::of).collect();
        if keys.is_empty() {
            Err(format!(
                "has no key that can verify signatures: of {count} keys none is an RSA, P-256, P-384 or Ed25519 key \
                 for signatures"
            ))
        } else {
            Ok(Self {
                keys,
                generation: GENERATIONS.fetch_add(1, Ordering::Relaxed),
            })
        }
    }

    pub(super) fn len(&self) -> usize {
        self.keys.len()
    }

    /// The keys that may have made a signature of this algorithm. A key without an id may be any; a token without one
    /// may be of any key.
    pub(super) fn candidates(
        &self,
        id: Option<&str>,
        algorithm: Algorithm,
    ) -> impl Iterator<Item = &DecodingKey> {
        let has_id = move |key: &&Key| match (id, &key.id) {
            (Some(id), Some(own)) => id == own,
            (None, _) | (_, None) => true,
        };
        let fits = move |key: &&Key| key.algorithms.contains(&algorithm);
        let found = self.keys.iter().filter(has_id).filter(fits);
        found.map(|key| &key.key)
    }
}

impl Key {
    fn of(listed: Value) -> Option<Self> {
        let jwk: Jwk = serde_json::from_value(listed).ok()?;
        let common = &jwk.common;
        let is_for_signatures =
            (common.public_key_use.as_ref()).is_none_or(|usage| *usage == PublicKeyUse::Signature);
        let may_verify = (common.key_operations.as_ref())
            .is_none_or(|allowed| allowed.contains(&KeyOperations::Verify));
        if !is_for_signatures || !may_verify {
            return None;
        }
        let mut algorithms: Vec<Algorithm> = match &jwk.algorithm {
            AlgorithmParameters::RSA(_) => vec![
                Algorithm::RS256,
                Algorithm::RS384,
                Algorithm::RS512,
                Algorithm::PS256,
                Algorithm::PS384,
                Algorithm::PS512,
            ],
            AlgorithmParameters::EllipticCurve(parameters)
                if parameters.curve == EllipticCurve::P256 =>
            {
                vec![Algorithm::ES256]
            }
            AlgorithmParameters::EllipticCurve(parameters)
                if parameters.curve == EllipticCurve::P384 =>
            {
                vec![Algorithm::ES384]
            }
            AlgorithmParameters::OctetKeyPair(parameters)
                if parameters.curve == EllipticCurve::Ed25519 =>
            {
                vec![Algorithm::EdDSA]
            }
            // Shared secrets among them: whoever can read a key set could sign with one.
            _ => return None,
        };
        if let Some(own) = common.key_algorithm {
            let own = own.to_string();
            algorithms.retain(|algorithm| algorithm.as_str() == own);
        }
        let key = DecodingKey::from_jwk(&jwk).ok()?;
        (!algorithms.is_empty()).then_some(Self {
            id: jwk.common.key_id,
            algorithms,
            key,
        })
    }
}

impl Algorithm {
    /// As the library calls it.
    pub(super) fn library(self) -> jsonwebtoken::Algorithm {
        self.as_str()
            .parse()
            .expect("the library knows it by the same name")
    }
}

/// What is wrong with a file of keys.
pub fn check_file(path: &str) -> Result<(), String> {
    let text = read_file(path)?;
    let read = KeySet::parse(&text).map(drop);
    read.map_err(|error| format!("`{path}` {error}"))
}

pub(super) fn read_file(path: &str) -> Result<Vec<u8>, String> {
    let cannot = |error: std::io::Error| format!("cannot read `{path}`: {error}");
    let length = fs::metadata(path).map_err(cannot)?.len();
    if length > MAX_BYTES as u64 {
        return Err(format!("`{path}` is larger than {MAX_BYTES} bytes"));
    }
    fs::read(path).map_err(cannot)
}
