//! A token's header: JSON with short names. Pure.

use serde::{Deserialize, Serialize};

use super::body::Compression;
use super::encryption::Encryption;
use super::types::Kind;

pub(super) const VERSION: u32 = 1;

/// Unknown names are ignored: a newer release may add some, and both releases run side by side during a
/// rollout.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Header {
    pub(super) v: u32,
    /// Kind.
    pub(super) k: Kind,
    /// Response id.
    pub(super) rid: String,
    /// Tenant tag.
    pub(super) t: String,
    /// Model.
    pub(super) m: String,
    /// Issued at and expires at, in Unix seconds.
    pub(super) iat: u64,
    pub(super) exp: u64,
    /// Compression of the body, and its decompressed size in bytes.
    pub(super) z: Compression,
    pub(super) n: u64,
    pub(super) enc: Encryption,
}

impl Header {
    pub(super) fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("strings and numbers make JSON")
    }

    pub(super) fn from_json(json: &[u8]) -> Option<Self> {
        serde_json::from_slice(json).ok()
    }
}
