//! What a carrier says of itself, as JSON under short names. Pure.

use serde::{Deserialize, Serialize};

use super::Kind;
use super::body::Compression;

pub(super) const VERSION: u32 = 1;

/// Names that are not known are passed over: a newer release may add some, and both run side by side
/// while it is rolled out.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Header {
    pub(super) v: u32,
    /// What it is for.
    pub(super) k: Kind,
    /// The response that it left with.
    pub(super) rid: String,
    /// Its tenant.
    pub(super) t: String,
    pub(super) m: String,
    /// When it was made and when it expires, in seconds since 1970.
    pub(super) iat: u64,
    pub(super) exp: u64,
    /// How its body is packed, and how many bytes it has unpacked.
    pub(super) z: Compression,
    pub(super) n: u64,
    pub(super) enc: Encryption,
}

/// What the body is encrypted with. Nothing, so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Encryption {
    None,
}

impl Header {
    pub(super) fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("strings and numbers make JSON")
    }

    pub(super) fn from_json(json: &[u8]) -> Option<Self> {
        serde_json::from_slice(json).ok()
    }
}
