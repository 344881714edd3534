//! The state that all connections of a worker share.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::sync::watch;

use super::adapters::Models;
use super::life::Life;
use super::own_tokens::OwnTokens;
use super::ranks::Ranks;
use super::recorder::Recorder;
use super::settings::Settings;
use super::transfer::state::{State, TransferStats};
use crate::sim::fault::{EarlyEnd, Faults};

#[derive(Debug)]
pub(crate) struct Shared {
    pub(super) settings: Settings,
    pub(super) models: Models,
    pub(super) addr: SocketAddr,
    /// The address of the bootstrap server, for a Mooncake prefill engine.
    pub(super) bootstrap: Option<SocketAddr>,
    pub(super) ranks: Ranks,
    pub(super) recorder: Recorder,
    pub(super) faults: watch::Sender<Faults>,
    pub(super) transfers: State,
    pub(super) life: Life,
    pub(super) own_tokens: Option<OwnTokens>,
    /// Since the Unix epoch.
    pub(super) started: Duration,
}

impl Shared {
    pub(super) fn faults(&self) -> Faults {
        self.faults.borrow().clone()
    }

    pub(super) fn set_faults(&self, faults: Faults) {
        // Under one lock, so that two concurrent sets do not mix.
        self.faults.send_modify(|current| {
            self.ranks.set_faults(&faults.kv);
            *current = faults;
        });
    }

    /// Waits until an answer of which this many tokens are sent stalls no more. Returns the faults of then.
    pub(super) async fn stall_is_over(&self, tokens: usize) -> Faults {
        let mut faults = self.faults.subscribe();
        let goes_on = |faults: &Faults| faults.early_end_after(tokens) != Some(EarlyEnd::Stall);
        // The sender is `self`'s, so that this cannot fail.
        let now = faults.wait_for(goes_on).await;
        now.map(|faults| faults.clone()).unwrap_or_default()
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
