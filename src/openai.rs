//! What all OpenAI-compatible endpoints share: error bodies, tenants, metadata, inserting a field into a body, the memory of
//! bodies, what a path leads to, random bits for ids.

pub mod body_budget;
pub mod error;
pub mod metadata;
pub mod splice;
pub mod tenant;

use self::error::ApiError;

/// The endpoint of an API for a method and path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RouteMatch<E> {
    Endpoint(E),
    /// The path exists; these methods are allowed.
    WrongMethod(&'static str),
    /// No path of this API.
    NotFound,
}

/// A part of a path without its percent-encoding.
pub fn decoded(part: &str) -> String {
    let decoded = percent_encoding::percent_decode_str(part);
    decoded.decode_utf8_lossy().into_owned()
}

/// Random bits for an id. From the operating system, since ids must not be guessable.
pub fn random() -> Result<u128, ApiError> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(|error| ApiError::no_randomness(&error))?;
    Ok(u128::from_ne_bytes(random))
}
