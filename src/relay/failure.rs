//! What failed, whose fault it is, and what else speaks against a worker or a request.

pub(super) mod budget;
pub(super) mod cuts;
pub(super) mod evidence;
pub(super) mod failure_owner;
pub(super) mod fault;
pub(super) mod open_share;
pub(super) mod quarantine;
pub mod types;
