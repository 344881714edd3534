//! What a request counts for at its worker while it runs: load, and blocks that are on their way.

use std::sync::Arc;
use std::time::Instant;

use smallvec::SmallVec;

use crate::fleet::Worker;
use crate::fleet::load::InFlight;
use crate::kv::expected::Coming;

/// Dropped, it takes back what is not true any more.
#[derive(Debug)]
pub(super) struct Running {
    in_flight: InFlight,
    coming: SmallVec<[Coming; 1]>,
}

impl Running {
    pub(super) fn new(in_flight: InFlight, coming: SmallVec<[Coming; 1]>) -> Self {
        Self { in_flight, coming }
    }

    /// The prompt is computed.
    pub(super) fn on_first_token(&mut self, now: Instant) {
        self.in_flight.on_first_token();
        for coming in self.coming.drain(..) {
            coming.on_first_token(now);
        }
    }

    pub(super) fn worker(&self) -> &Arc<Worker> {
        self.in_flight.worker()
    }
}
