//! What failed, whose fault it is, and whether it is tried again.

pub(super) mod budget;
pub(super) mod cuts;
pub(super) mod evidence;
pub(super) mod failure_owner;
pub(super) mod quarantine;
pub(super) mod request_outcome;
pub mod retries;
