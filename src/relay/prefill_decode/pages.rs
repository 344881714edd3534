//! What admin pages show of disaggregation, and what is forgotten of workers that left or restarted.

use std::time::Instant;

use rustc_hash::FxHashSet;

use crate::fleet::Snapshot;
use crate::fleet::handoff::Connector;
use crate::fleet::handoff::pairs::Pairs;
use crate::ids::WorkerId;
use crate::relay::core::Relay;

impl Relay {
    /// True if requests are disaggregated.
    pub fn is_disaggregated(&self) -> bool {
        self.prefill_decode.is_some()
    }

    /// The pairs of the workers that are up. `None` if requests are not disaggregated.
    pub fn pairs(&self) -> Option<(Connector, Pairs)> {
        let connector = self.prefill_decode.as_ref()?.connector;
        let pairs = Pairs::of(&self.fleet.snapshot(), connector, self.fleet.topology());
        Some((connector, pairs))
    }

    /// KV transfers of a prefill worker whose blocks were not fetched yet, and the tokens of those blocks. `None` if
    /// requests are not disaggregated.
    pub fn pinned(&self, now: Instant, worker: WorkerId) -> Option<(usize, u64)> {
        let it = self.prefill_decode.as_ref()?;
        Some(it.pinned.of(now, worker))
    }

    /// Forgets the pinned blocks of a worker whose engine process is a new one.
    pub fn forget_pinned(&self, worker: WorkerId) {
        if let Some(it) = &self.prefill_decode {
            it.pinned.forget(worker);
        }
    }

    /// Forgets workers that left the fleet, and removes their metric series.
    pub fn forget_departed_workers(&self, fleet: &Snapshot) {
        if let Some(it) = &self.prefill_decode {
            let workers = fleet.workers.iter();
            let listed: FxHashSet<WorkerId> = workers.map(|status| status.worker.id).collect();
            it.pinned.retain(|worker| listed.contains(&worker));
        }
        self.models.remove_workers(fleet);
    }
}
