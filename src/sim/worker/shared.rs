//! The state that all connections of a worker share.

use std::net::SocketAddr;
use std::time::Duration;

use parking_lot::Mutex;

use super::adapters::Models;
use super::life::Life;
use super::own_tokens::OwnTokens;
use super::ranks::Ranks;
use super::recorder::Recorder;
use super::settings::Settings;
use super::transfer::state::{State, TransferStats};
use crate::sim::fault::Faults;

#[derive(Debug)]
pub(crate) struct Shared {
    pub(super) settings: Settings,
    pub(super) models: Models,
    pub(super) addr: SocketAddr,
    /// The address of the bootstrap server, for a Mooncake prefill engine.
    pub(super) bootstrap: Option<SocketAddr>,
    pub(super) ranks: Ranks,
    pub(super) recorder: Recorder,
    pub(super) faults: Mutex<Faults>,
    pub(super) transfers: State,
    pub(super) life: Life,
    pub(super) own_tokens: Option<OwnTokens>,
    /// Since the Unix epoch.
    pub(super) started: Duration,
}

impl Shared {
    pub(super) fn faults(&self) -> Faults {
        self.faults.lock().clone()
    }

    pub(super) fn set_faults(&self, faults: Faults) {
        // Under one lock, so that two concurrent sets do not mix.
        let mut current = self.faults.lock();
        self.ranks.set_faults(&faults.kv);
        *current = faults;
    }

    pub(super) fn kv_transfers(&self) -> TransferStats {
        let (gauges, counters) = (self.ranks.gauges(), self.ranks.counters());
        TransferStats {
            pinned: gauges.kept,
            pinned_blocks: gauges.kept_blocks,
            pinned_blocks_peak: counters.kept_blocks_peak,
            expired: counters.kept_expired,
            received_tokens: counters.received_tokens,
            ..self.transfers.stats()
        }
    }

    /// vLLM's engine core dies: running requests end with an error, and the process exits soon after.
    pub(super) fn kill_core(&self) {
        self.life.kill_core();
        self.ranks.kill();
    }
}
