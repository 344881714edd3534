//! What all OpenAI-compatible endpoints share: error bodies, tenants, metadata, inserting a field into a body.

pub mod error;
pub mod metadata;
pub mod splice;
pub mod tenant;
