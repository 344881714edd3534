//! JSON Web Tokens that clients send instead of an API key: whose token it is, verified by the keys of its issuer.
//!
//! A token is verified once and then known by its digest ([`Cache`]) until it expires or its issuer's keys change. Keys
//! come from a file or a URL, are fetched in the background and kept if they cannot be fetched again. Knows no tenants:
//! it says what a token's claim names.

#[cfg(not(feature = "jwt"))]
mod absent;
#[cfg(feature = "jwt")]
mod cache;
#[cfg(feature = "jwt")]
mod issuer_keys;
#[cfg(feature = "jwt")]
mod key_set;
mod location;
#[cfg(feature = "jwt")]
mod metrics;
#[cfg(feature = "jwt")]
mod pacing;
#[cfg(feature = "jwt")]
mod rejection;
#[cfg(feature = "jwt")]
mod ring_signatures;
mod settings;
#[cfg(feature = "jwt")]
mod verifier;
#[cfg(feature = "jwt")]
mod verify;

#[cfg(not(feature = "jwt"))]
pub use self::absent::Verifier;
#[cfg(feature = "jwt")]
pub use self::cache::{Cache, TokenDigest};
#[cfg(feature = "jwt")]
pub use self::key_set::check_file;
#[cfg(feature = "jwt")]
pub use self::rejection::Rejection;
pub use self::settings::{Algorithm, IssuerSettings, Settings};
#[cfg(feature = "jwt")]
pub use self::verifier::{Verified, Verifier, look_once};

/// Whether this build can verify tokens.
pub const IS_BUILT_IN: bool = cfg!(feature = "jwt");

/// Nothing is checked of a file with keys that this build does not use.
#[cfg(not(feature = "jwt"))]
pub fn check_file(_: &str) -> Result<(), String> {
    Ok(())
}
