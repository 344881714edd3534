//! What a state token contains, before it is signed and after it is verified. Pure.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::body::Compression;
use super::encryption::Encryption;
use crate::ids::Tenant;

/// What every token of this version begins with.
pub const PREFIX: &str = "wrc1.";

/// What a token contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The items of a conversation, up to and including the output of one response.
    Turn,
    /// One reasoning item with its full text.
    Reasoning,
    /// The items that stand for a compacted conversation.
    Compaction,
}

/// What to write into a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Content<'a> {
    pub kind: Kind,
    /// The response that the token is sent with.
    pub response_id: &'a str,
    pub model: &'a str,
    /// A JSON array of items.
    pub items: &'a str,
}

/// The content of a token that was verified and unpacked.
#[derive(Clone, Debug, PartialEq)]
pub struct Payload {
    pub response_id: String,
    /// Seconds since 1970.
    pub issued_s: u64,
    /// A JSON array of items, byte for byte as it was issued.
    pub items: String,
}

/// A token whose signature and expiry are good. Its body is still compressed.
#[derive(Debug)]
pub struct Verified<'a> {
    pub kind: Kind,
    pub model: String,
    /// Size of the items after decompression.
    pub plain_bytes: u64,
    pub(super) response_id: String,
    pub(super) issued_s: u64,
    pub(super) compression: Compression,
    pub(super) encryption: Encryption,
    pub(super) tenant: Tenant,
    /// The header's JSON.
    pub(super) header: Vec<u8>,
    pub(super) body: &'a str,
    /// The whole token.
    pub(super) text: &'a str,
    /// Position in the key ring of the key that signed the token.
    pub(super) key_index: usize,
}

impl Payload {
    /// The items, each as its own JSON text.
    pub fn each(&self) -> Vec<&RawValue> {
        // The list was parsed when the token was unpacked.
        serde_json::from_str(&self.items).unwrap_or_default()
    }
}
