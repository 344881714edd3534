//! What all disaggregated requests share.

use std::sync::Arc;
use std::time::Duration;

use super::metrics::Families;
use super::pinned_blocks::PinnedBlocks;
use super::settings::{OnPrefillFailure, Settings};
use crate::fleet::kv_transfer::Connector;
use crate::observe::metrics::Registry;
use crate::routing::pair;

#[derive(Debug)]
pub(in crate::relay) struct Disaggregation {
    pub(in crate::relay) connector: Connector,
    pub(in crate::relay) pair: pair::Settings,
    on_prefill_failure: OnPrefillFailure,
    pub(in crate::relay) lease: Duration,
    pub(in crate::relay) transfer_timeout: Duration,
    pub(in crate::relay) pinned: Arc<PinnedBlocks>,
    pub(in crate::relay) families: Families,
}

impl Disaggregation {
    /// `None` without a connector: then no request is disaggregated.
    pub(in crate::relay) fn new(settings: &Settings, registry: &Registry) -> Option<Self> {
        let connector = settings.connector?;
        let families = Families::new(registry);
        Some(Self::with(settings, connector, Arc::default(), families))
    }

    /// With other settings, and with the blocks that are pinned now.
    pub(in crate::relay) fn successor(&self, settings: &Settings) -> Self {
        Self::with(
            settings,
            self.connector,
            self.pinned.clone(),
            self.families.clone(),
        )
    }

    fn with(
        settings: &Settings,
        connector: Connector,
        pinned: Arc<PinnedBlocks>,
        families: Families,
    ) -> Self {
        let (min_remote_tokens, on_prefill_failure) = if connector.decodes_alone() {
            let min = settings.advanced.min_remote_tokens;
            (min, settings.on_prefill_failure)
        } else {
            (0, OnPrefillFailure::Fail)
        };
        Self {
            connector,
            pair: pair::Settings { min_remote_tokens },
            on_prefill_failure,
            lease: settings.kv_lease(connector),
            transfer_timeout: settings.advanced.transfer_timeout,
            pinned,
            families,
        }
    }

    /// True if a decode worker computes the prompt itself when no prefill worker can.
    pub(in crate::relay) fn is_local_prefill_allowed(&self) -> bool {
        self.on_prefill_failure == OnPrefillFailure::Local
    }
}
