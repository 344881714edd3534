//! What all OpenAI-compatible endpoints share: error bodies, tenants, metadata, inserting a field into a body, the memory
//! of bodies.

pub mod body_budget;
pub mod error;
pub mod metadata;
pub mod splice;
pub mod tenant;
