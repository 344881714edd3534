//! What all OpenAI-compatible endpoints share: error bodies, tenants, inserting a field into a body.

pub mod error;
pub mod splice;
pub mod tenant;
