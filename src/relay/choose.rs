//! Which workers get a request: what the fleet looks like, what was promised, what was chosen.

pub(super) mod chooser;
pub(super) mod chosen;
pub(super) mod failed_workers;
pub mod fleet_view;
pub(super) mod promised;
