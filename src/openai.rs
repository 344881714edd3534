//! What all OpenAI-compatible endpoints share: error bodies, tenants, metadata, inserting a field into a body, the memory of
//! bodies, random bits for ids.

pub mod body_budget;
pub mod error;
pub mod metadata;
pub mod splice;
pub mod tenant;

use self::error::ApiError;

/// Random bits for an id. From the operating system, since ids must not be guessable.
pub fn random() -> Result<u128, ApiError> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(|error| ApiError::no_randomness(&error))?;
    Ok(u128::from_ne_bytes(random))
}
