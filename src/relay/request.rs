//! What came: the fields that are read and changed in a body, the names of models, whose request it is.

pub(super) mod batch_line;
pub(super) mod body_edit;
pub(super) mod context;
pub(super) mod gateway;
pub(super) mod output_cap;
pub(super) mod priority_cap;
pub(super) mod session_key;
pub(super) mod summary;
pub mod target;
pub(super) mod tenants;
pub(super) mod usage_option;
