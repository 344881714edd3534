//! What a request counts for at its worker while it runs: load, and blocks that are on their way; and
//! what is to be looked for when they are there.

use std::sync::Arc;
use std::time::Instant;

use smallvec::SmallVec;

use crate::fleet::Worker;
use crate::fleet::load::InFlight;
use crate::kv::expected::Coming;
use crate::kv::parity::Check;
use crate::kv::subscriber::Asking;

/// Dropped, it takes back what is not true any more.
#[derive(Debug)]
pub(super) struct Running {
    in_flight: InFlight,
    coming: SmallVec<[Coming; 1]>,
    check: Option<Check>,
    asking: Option<Asking>,
}

impl Running {
    pub(super) fn new(
        in_flight: InFlight,
        coming: SmallVec<[Coming; 1]>,
        check: Option<Check>,
        asking: Option<Asking>,
    ) -> Self {
        Self {
            in_flight,
            coming,
            check,
            asking,
        }
    }

    /// The engine does not compute the prompt.
    pub(super) fn on_refusal(&mut self) {
        self.coming.clear();
        self.check = None;
        self.asking = None;
    }

    /// The prompt is computed.
    pub(super) fn on_first_token(&mut self, now: Instant) {
        self.in_flight.on_first_token();
        for coming in self.coming.drain(..) {
            coming.on_first_token(now);
        }
        if let Some(check) = self.check.take() {
            check.on_first_token();
        }
        self.asking = None;
    }

    pub(super) fn worker(&self) -> &Arc<Worker> {
        self.in_flight.worker()
    }
}
