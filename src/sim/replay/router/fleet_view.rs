//! What a routing decision of a replay sees of the fleet.

use super::cached_tokens::{CachedTokens, tie_breaker};
use super::speeds::Speeds;
use crate::fleet;
use crate::fleet::load::LoadShare;
use crate::routing::{self, Cached, State, View};

/// The view of the fleet that a routing decision gets.
pub(super) struct FleetView<'a> {
    pub(super) loads: &'a [LoadShare],
    pub(super) engines: &'a [fleet::load::Load],
    pub(super) speeds: &'a Speeds,
    pub(super) cached: &'a CachedTokens<'a>,
}

impl View for FleetView<'_> {
    fn len(&self) -> usize {
        self.loads.len()
    }

    fn state(&self, worker_index: usize) -> State {
        let load = &self.loads[worker_index];
        State {
            is_usable: true,
            requests: load.requests,
            delayed: routing::delayed(load.requests, self.engines[worker_index].usual_requests()),
            queued_tokens: load.queued_tokens,
            context_tokens: load.context_tokens,
            speed: self.speeds.speeds[worker_index],
            slots: self.engines[worker_index].slots(),
            waiting: self.engines[worker_index].waiting(),
            ..State::default()
        }
    }

    fn mean_prompt_token(&self) -> f64 {
        self.speeds.mean_prompt_token()
    }

    fn min_prompt_token(&self) -> f64 {
        let speeds = self.speeds.speeds.iter();
        let times = speeds.map(|speed| speed.prompt_token);
        times.fold(f64::INFINITY, f64::min)
    }

    fn identity(&self, worker_index: usize) -> u64 {
        tie_breaker(0, worker_index)
    }

    fn prefix_owners(&self) -> &[usize] {
        self.cached.holders()
    }

    fn cached(&self, worker_index: usize) -> Cached {
        Cached::in_gpu(self.cached.tokens(worker_index))
    }
}
