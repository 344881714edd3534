//! What every OpenAI-shaped surface shares: error bodies, tenants, splicing a field into a body.

pub mod error;
pub mod splice;
pub mod tenant;
