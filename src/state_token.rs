//! State tokens: signed text in which a client keeps the state of its conversation.
//!
//! A token leaves with one answer and comes back with a later request. Any replica that has the key can
//! continue the conversation, and no replica stores it.
//!
//! ```text
//! wrc1.<key id>.<header>.<body>.<mac>
//!      8 hex     JSON     items, encrypted; HMAC-SHA256 over everything before the last dot
//! ```
//!
//! Header, body and MAC are base64url without padding. The MAC key is derived (HKDF-SHA256) from one key
//! of the key ring for one purpose and one tenant, so a token of another tenant fails like a forged one.
//! The MAC is checked, in constant time, before anything is decoded.
//!
//! The body is compressed and then encrypted (XChaCha20-Poly1305) with a key derived the same way; the header's `enc`
//! says so. Tokens that are only signed are accepted as well: earlier releases issued them, and `encrypt: false` does.
//! A token cannot be revoked: its holder may send it any number of times until it expires, and so branch a
//! conversation.
//!
//! Pure: the time is an argument, and no randomness is needed.

mod body;
mod encryption;
mod header;
mod key;
mod key_ring;
mod metrics;
mod rejection;
mod settings;
mod types;

pub use self::key::Key;
pub use self::key_ring::KeyRing;
pub use self::rejection::{RejectReason, Rejected, TooLarge};
pub use self::settings::Settings;
pub use self::types::{Content, Kind, PREFIX, Payload, Verified};

#[cfg(test)]
mod tests;
