//! What a router of a replay knows of the workers' speeds: the router's own learners. Pure.

use std::time::Duration;

use super::load::Load;
use crate::fleet::speed::{Learner, LoadNow, Passed, Seen, Speed};

/// What a router knows of the workers' prefill rates.
#[derive(Clone, Debug)]
pub(crate) enum PrefillRates {
    /// Nothing.
    Ignored,
    /// They are configured, by worker.
    Configured(Vec<f64>),
    Learnt,
}

#[derive(Debug)]
pub(super) struct Speeds {
    /// By worker; empty unless speeds are learnt.
    learners: Vec<(Seen, Learner)>,
    pub(super) speeds: Vec<Speed>,
}

impl Speeds {
    pub(super) fn new(rates: &PrefillRates, workers: usize) -> Self {
        let learners = match rates {
            PrefillRates::Learnt => workers,
            PrefillRates::Ignored | PrefillRates::Configured(_) => 0,
        };
        let speeds = match rates {
            PrefillRates::Configured(rates) => {
                let of = |rate: &f64| Speed {
                    prompt_token: 1.0 / rate,
                    ..Speed::default()
                };
                rates.iter().map(of).collect()
            }
            PrefillRates::Ignored | PrefillRates::Learnt => vec![Speed::default(); workers],
        };
        Self {
            learners: (0..learners).map(|_| Default::default()).collect(),
            speeds,
        }
    }

    /// `own` and `peers`: after it counts.
    pub(super) fn on_sent(
        &self,
        now: Duration,
        worker: usize,
        own: &Load,
        peers: &Load,
    ) -> Option<Passed> {
        let (seen, _) = self.learners.get(worker)?;
        Some(seen.on_sent(now, &load_now(own, peers), true))
    }

    /// `own` and `peers`: while its prompt counts as queued.
    pub(super) fn on_first_token(
        &self,
        now: Duration,
        worker: usize,
        (sent, uncached_tokens): (&Passed, u32),
        (own, peers): (&Load, &Load),
    ) -> Option<Passed> {
        let (seen, _) = self.learners.get(worker)?;
        Some(seen.on_first_token(now, sent, uncached_tokens, &load_now(own, peers)))
    }

    pub(super) fn on_end(
        &self,
        now: Duration,
        worker: usize,
        (first, tokens): (&Passed, u32),
        (own, peers): (&Load, &Load),
    ) {
        if let Some((seen, _)) = self.learners.get(worker) {
            seen.on_end(now, first, tokens.into(), 0, &load_now(own, peers));
        }
    }

    pub(super) fn learn(&mut self) {
        for ((seen, learner), speed) in self.learners.iter_mut().zip(&mut self.speeds) {
            let mut rows = seen.take();
            learner.on_median(&mut rows.firsts);
            learner.on_median(&mut rows.ends);
            *speed = learner.speed();
        }
    }
}

fn load_now(own: &Load, peers: &Load) -> LoadNow {
    LoadNow {
        requests: own.requests + peers.requests,
        own_requests: own.requests,
        context_tokens: own.context_tokens + peers.context_tokens,
        queued_tokens: own.queued_tokens,
        peers_queued_tokens: peers.queued_tokens,
        is_full: false,
    }
}
