//! What a router of a replay knows of the workers' speeds: the router's own learners. Pure.

use std::time::Duration;

use crate::fleet;
use crate::fleet::load::LoadShare;
use crate::fleet::speed::{Learner, LoadNow, OwnSpeed, Passed, Seen, Speed};

/// What a router knows of its workers' speeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Rates {
    /// Nothing: workers count as equal.
    Ignored,
    /// They are configured (`prefill_rate`).
    Configured,
    /// What first tokens show.
    Learnt,
}

#[derive(Debug)]
pub(super) struct Speeds {
    /// By worker; empty unless speeds are learnt.
    learners: Vec<(Seen, OwnSpeed)>,
    /// All workers are taken to be alike: of one model, without a label of their hardware.
    alike: Learner,
    pub(super) speeds: Vec<Speed>,
}

impl Speeds {
    /// `prefill_rates`: of each worker, if they are configured.
    pub(super) fn new(rates: Rates, prefill_rates: &[f64]) -> Self {
        let workers = prefill_rates.len();
        let learners = match rates {
            Rates::Learnt => workers,
            Rates::Ignored | Rates::Configured => 0,
        };
        let speeds = match rates {
            Rates::Configured => {
                let of = |rate: &f64| Speed {
                    prompt_token: 1.0 / rate,
                    ..Speed::default()
                };
                prefill_rates.iter().map(of).collect()
            }
            Rates::Ignored | Rates::Learnt => vec![Speed::default(); workers],
        };
        Self {
            learners: (0..learners).map(|_| Default::default()).collect(),
            alike: Learner::default(),
            speeds,
        }
    }

    /// `loads`: before it counts.
    pub(super) fn on_sent(&self, now: Duration, worker: usize, loads: Loads<'_>) -> Option<Passed> {
        let (seen, _) = self.learners.get(worker)?;
        Some(seen.on_sent(now, &loads.now(), true))
    }

    /// `loads`: while its prompt counts as queued.
    pub(super) fn on_first_token(
        &self,
        now: Duration,
        worker: usize,
        (sent, uncached_tokens): (&Passed, u32),
        loads: Loads<'_>,
    ) -> Option<Passed> {
        let (seen, _) = self.learners.get(worker)?;
        Some(seen.on_first_token(now, sent, uncached_tokens, &loads.now()))
    }

    pub(super) fn on_end(
        &self,
        now: Duration,
        worker: usize,
        (first, tokens): (&Passed, u32),
        loads: Loads<'_>,
    ) {
        if let Some((seen, _)) = self.learners.get(worker) {
            seen.on_end(now, first, tokens.into(), 0, &loads.now());
        }
    }

    /// Seconds for a prompt token at the mean rate of the workers.
    pub(super) fn mean_prompt_token(&self) -> f64 {
        let rates = self.speeds.iter().map(Speed::rate);
        self.speeds.len() as f64 / rates.sum::<f64>()
    }

    pub(super) fn learn(&mut self) {
        for (seen, own) in &mut self.learners {
            own.on_rows(&mut self.alike, seen.take());
        }
        let alike = self.alike.speed();
        for ((_, own), speed) in self.learners.iter_mut().zip(&mut self.speeds) {
            *speed = own.speed(&alike);
        }
    }
}

/// What a router knows of one worker.
#[derive(Clone, Copy)]
pub(super) struct Loads<'a> {
    pub(super) own: &'a LoadShare,
    pub(super) peers: &'a LoadShare,
    /// What its engine says.
    pub(super) reported: &'a fleet::load::Load,
}

impl Loads<'_> {
    fn now(self) -> LoadNow {
        let (own, peers) = (self.own, self.peers);
        let (requests, slots) = (own.requests + peers.requests, self.reported.slots());
        LoadNow {
            requests,
            context_tokens: own.context_tokens + peers.context_tokens,
            peers_queued_tokens: peers.queued_tokens,
            next_waits: requests >= slots || self.reported.waiting() > 0,
            is_full: requests > slots || self.reported.waiting() > 0,
        }
    }
}
