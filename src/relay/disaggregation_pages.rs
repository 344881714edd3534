//! What the admin API shows of disaggregated requests, and the removal of state of workers and models that left the fleet,
//! and of workers that restarted.

use std::time::Instant;

use rustc_hash::FxHashSet;

use super::core::Relay;
use crate::fleet::Snapshot;
use crate::fleet::kv_transfer::Connector;
use crate::fleet::kv_transfer::pairs::Pairs;
use crate::ids::WorkerId;
use crate::observe;

impl Relay {
    /// True if the configuration enables disaggregated prefill/decode.
    pub fn is_disaggregated(&self) -> bool {
        self.prefill_decode.is_some()
    }

    /// The connector, and the pairs among the workers that are up. `None` without disaggregation.
    pub fn pairs(&self) -> Option<(Connector, Pairs)> {
        let connector = self.prefill_decode.as_ref()?.connector;
        let pairs = Pairs::of(
            &self.fleet().snapshot(),
            connector,
            &self.fleet().topology(),
        );
        Some((connector, pairs))
    }

    /// What a prefill worker still keeps pinned for decode workers that have not fetched it: the number of KV
    /// transfers, and the tokens of their blocks. `None` without disaggregation.
    pub fn pinned(&self, now: Instant, worker: WorkerId) -> Option<(usize, u64)> {
        let prefill_decode = self.prefill_decode.as_ref()?;
        Some(prefill_decode.pinned.of(now, worker))
    }

    /// Forgets the pinned blocks of a worker whose engine has restarted.
    pub fn forget_pinned(&self, worker: WorkerId) {
        if let Some(prefill_decode) = &self.prefill_decode {
            prefill_decode.pinned.forget(worker);
        }
    }

    /// Forgets workers and models that left the fleet, and removes their metric series.
    pub fn forget_departed_workers(&self, fleet: &Snapshot) {
        if let Some(prefill_decode) = &self.prefill_decode {
            let workers = fleet.workers.iter();
            let listed: FxHashSet<WorkerId> = workers.map(|status| status.worker.id).collect();
            prefill_decode
                .pinned
                .retain(|worker| listed.contains(&worker));
        }
        let is_configured = |model: &str| self.queues().is_known(model);
        let shared = &self.models.shared;
        shared.forget_departed(observe::now(), fleet, is_configured, &self.usage);
        self.queues().remove_gone(fleet);
    }
}
