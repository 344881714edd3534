//! What a tenant has left of its limits, as one request learns it. Pure.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::limits::Standing;

/// Receives what the tenant of a request has left of its limits, for the headers of the answer.
#[derive(Clone, Debug, Default)]
pub struct StandingCell(Arc<Mutex<Option<Standing>>>);

impl StandingCell {
    pub fn read(&self) -> Option<Standing> {
        *self.0.lock()
    }

    pub(in crate::relay) fn set(&self, standing: Standing) {
        *self.0.lock() = Some(standing);
    }
}
