//! What a routing decision of a replay sees of the fleet.

use super::cached_tokens::{CachedTokens, tie_breaker};
use super::speeds::Speeds;
use crate::fleet;
use crate::fleet::load::LoadShare;
use crate::ids::ViewIndex;
use crate::routing::{self, Cached, SharedPrefix, State, View};

/// The view of the fleet that a routing decision gets: every simulated engine, in order.
pub(super) struct FleetView<'a> {
    pub(super) loads: &'a [LoadShare],
    pub(super) engines: &'a [fleet::load::Load],
    pub(super) speeds: &'a Speeds,
    pub(super) cached: &'a CachedTokens,
    pub(super) shared: SharedPrefix,
}

impl View for FleetView<'_> {
    fn len(&self) -> usize {
        self.loads.len()
    }

    fn state(&self, index: ViewIndex) -> State {
        let worker = index.get();
        let load = &self.loads[worker];
        State {
            is_usable: true,
            requests: load.requests,
            delayed: routing::delayed(load.requests, self.engines[worker].usual_requests()),
            queued_tokens: load.queued_tokens,
            context_tokens: load.context_tokens,
            speed: self.speeds.speeds[worker],
            slots: self.engines[worker].slots(),
            waiting: self.engines[worker].waiting(),
            // Traces name no adapters.
            lacks_adapter: false,
        }
    }

    fn mean_prompt_token(&self) -> f64 {
        self.speeds.mean_prompt_token()
    }

    fn waiting_prompts(&self) -> f64 {
        let engines = self.engines.iter();
        let waiting = engines.map(fleet::load::Load::usual_waiting_prompts);
        waiting.sum::<f64>() / self.engines.len() as f64
    }

    fn min_prompt_token(&self) -> f64 {
        let speeds = self.speeds.speeds.iter();
        let times = speeds.map(|speed| speed.prompt_token);
        times.fold(f64::INFINITY, f64::min)
    }

    fn identity(&self, index: ViewIndex) -> u64 {
        tie_breaker(0, index.get())
    }

    fn prefix_owners(&self) -> &[ViewIndex] {
        &self.cached.owners
    }

    fn shared_prefix(&self) -> SharedPrefix {
        self.shared
    }

    fn cached(&self, index: ViewIndex) -> Cached {
        Cached::in_gpu(self.cached.tokens(index))
    }
}
