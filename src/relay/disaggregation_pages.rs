//! What the admin API shows of disaggregated requests.

use std::time::Instant;

use super::core::Relay;
use crate::fleet::kv_transfer::Connector;
use crate::fleet::kv_transfer::pairs::Pairs;
use crate::ids::WorkerId;

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
}
