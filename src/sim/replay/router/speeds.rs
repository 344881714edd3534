//! What a router of a replay knows of the workers' speeds: the router's own learners. Pure.

use std::time::Duration;

use crate::fleet::decode_time::{self, DecodeTimes};
use crate::fleet::prefill_rate::{FirstToken, Learner, Seen, compare};

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
    /// By worker; empty unless rates are learnt.
    workers: Vec<(Seen, Learner)>,
    pub(super) time_weights: Vec<f64>,
    /// By worker; empty unless speeds are learnt.
    streams: Vec<DecodeTimes>,
    pub(super) decode_times: Vec<f64>,
}

impl Speeds {
    pub(super) fn new(rates: &PrefillRates, workers: usize) -> Self {
        let learners = match rates {
            PrefillRates::Learnt => workers,
            PrefillRates::Ignored | PrefillRates::Configured(_) => 0,
        };
        let time_weights = match rates {
            PrefillRates::Configured(rates) => {
                let rates: Vec<_> = rates.iter().map(|rate| (Some(*rate), 1.0)).collect();
                compare(&rates)
            }
            PrefillRates::Ignored | PrefillRates::Learnt => vec![1.0; workers],
        };
        Self {
            workers: (0..learners).map(|_| Default::default()).collect(),
            time_weights,
            streams: (0..learners).map(|_| Default::default()).collect(),
            decode_times: vec![1.0; workers],
        }
    }

    pub(super) fn on_first_token(&self, worker: usize, first: &FirstToken) {
        if let Some((seen, _)) = self.workers.get(worker) {
            seen.on_first_token(first);
        }
    }

    pub(super) fn on_end(&self, worker: usize, tokens: u32, time: Duration) {
        if let Some(streams) = self.streams.get(worker) {
            streams.on_stream(tokens.into(), time);
        }
    }

    pub(super) fn learn(&mut self) {
        if self.workers.is_empty() {
            return;
        }
        let before = self.time_weights.iter();
        let workers = self.workers.iter_mut().zip(before);
        let rates: Vec<_> = workers
            .map(|((seen, learner), before)| {
                learner.on_sample(&seen.take());
                (learner.rate(), *before)
            })
            .collect();
        self.time_weights = compare(&rates);
        let times = self.streams.iter().zip(&self.decode_times);
        let times: Vec<_> = times
            .map(|(seen, before)| (seen.median(), *before))
            .collect();
        self.decode_times = decode_time::compare(&times);
    }
}
