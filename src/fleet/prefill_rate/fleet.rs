//! Learns the prefill rates of the fleet's workers and compares those of each model. Pure: its caller takes the snapshots.

use std::collections::BTreeMap;

use super::compare::compare;
use super::learner::Learner;
use crate::fleet::{Snapshot, Worker};
use crate::ids::WorkerId;

/// What is learnt of all workers.
#[derive(Debug, Default)]
pub struct PrefillRates {
    workers: BTreeMap<WorkerId, Learnt>,
}

#[derive(Debug, Default)]
struct Learnt {
    /// The engine process that it is about.
    incarnation: u64,
    learner: Learner,
}

impl PrefillRates {
    /// To be called once a second: takes what was seen, and sets the workers' time weights. Without `learns`, only
    /// rates that are configured count.
    pub fn update(&mut self, snapshot: &Snapshot, learns: bool) {
        let mut before = std::mem::take(&mut self.workers);
        for status in &snapshot.workers {
            let worker = &status.worker;
            let sample = worker.first_tokens.take();
            let mut learnt = before.remove(&worker.id).unwrap_or_default();
            if learnt.incarnation != status.incarnation || !learns {
                learnt = Learnt {
                    incarnation: status.incarnation,
                    learner: Learner::default(),
                };
            }
            if learns {
                learnt.learner.on_sample(&sample);
            }
            worker.set_learnt_prefill_rate(learnt.learner.rate());
            self.workers.insert(worker.id, learnt);
        }
        let mut time_weights = BTreeMap::new();
        for group in snapshot.models.values().filter(|group| !group.is_adapter) {
            let workers = || group.workers.iter();
            let rates: Vec<_> = workers()
                .map(|worker| (rate(worker), worker.load.time_weight()))
                .collect();
            let ids = workers().map(|worker| worker.id);
            time_weights.extend(ids.zip(compare(&rates)));
        }
        let of = |worker: &Worker| time_weights.get(&worker.id).copied().unwrap_or(1.0);
        let workers = || snapshot.workers.iter().map(|status| &status.worker);
        let lowest = workers().map(|worker| of(worker)).fold(1.0, f64::min);
        let Some(any) = workers().next() else { return };
        // Never above the time weight of any worker.
        any.min_time_weight.lower(lowest);
        for worker in workers() {
            worker.load.set_time_weight(of(worker));
        }
        any.min_time_weight.set(lowest);
    }
}

/// As configured, else as learnt.
fn rate(worker: &Worker) -> Option<f64> {
    worker.prefill_rate().map(|(rate, _)| rate)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;
    use std::ops::Range;
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::fleet::prefill_rate::FirstToken;
    use crate::fleet::registry::Registry;
    use crate::fleet::registry::tests::{bring_up, member, registry};

    /// Lets each worker compute prompts at a rate, for `seconds`.
    fn see(rates: &mut PrefillRates, registry: &Registry, speeds: &[u32], seconds: Range<u64>) {
        for second in seconds {
            let snapshot = registry.snapshot().clone();
            for (status, rate) in snapshot.workers.iter().zip(speeds) {
                let now = Duration::from_secs(1_000_000 + second);
                status.worker.first_tokens.on_first_token(&FirstToken {
                    sent: now - Duration::from_millis(500),
                    now,
                    uncached_tokens: rate / 2,
                    queued_tokens: 0,
                    peers_queued_tokens: 0,
                });
            }
            rates.update(&snapshot, true);
        }
    }

    fn time_weights(registry: &Registry) -> Vec<f64> {
        let snapshot = registry.snapshot();
        let workers = snapshot.workers.iter();
        workers.map(|it| it.worker.load.time_weight()).collect()
    }

    fn weights(times: [f64; 2]) -> [f64; 2] {
        times.map(|time| f64::from(time.powf(0.7) as f32))
    }

    fn bound(registry: &Registry) -> f64 {
        registry.snapshot().workers[0].worker.min_time_weight.get()
    }

    #[test]
    fn workers_of_unequal_speed_differ_and_a_restarted_one_counts_as_the_mean() {
        let registry = registry(&["slow", "fast"]);
        bring_up(&registry, "m");
        let mut rates = PrefillRates::default();
        see(&mut rates, &registry, &[8_000, 32_000], 0..6);
        assert_eq!(time_weights(&registry), [1.0, 1.0]);
        see(&mut rates, &registry, &[8_000, 32_000], 6..7);
        assert_eq!(time_weights(&registry), weights([2.5, 0.625]));
        assert_eq!(bound(&registry), weights([2.5, 0.625])[1]);
        let slow = registry.snapshot().workers[0].worker.clone();
        registry.restarted(slow.id);
        rates.update(&registry.snapshot(), true);
        assert_eq!(slow.prefill_rate(), None);
        assert_eq!(time_weights(&registry), [1.0, 1.0]);
        assert_eq!(bound(&registry), 1.0);
    }

    #[test]
    fn a_configured_rate_counts_before_what_is_learnt_and_without_learning() {
        let registry = registry(&[]);
        let mut members = ["a", "b"].map(member).to_vec();
        members[0].prefill_rate = NonZeroU32::new(1_000);
        members[1].prefill_rate = NonZeroU32::new(3_000);
        registry.set_members("static", members);
        bring_up(&registry, "m");
        let mut rates = PrefillRates::default();
        see(&mut rates, &registry, &[8_000, 8_000], 0..9);
        assert_eq!(time_weights(&registry), weights([2.0, 2.0 / 3.0]));
        rates.update(&registry.snapshot(), false);
        assert_eq!(time_weights(&registry), weights([2.0, 2.0 / 3.0]));
    }

    #[test]
    fn models_are_compared_each_with_its_own_workers() {
        let registry = registry(&["small 1", "small 2", "large 1", "large 2"]);
        bring_up(&registry, "small");
        let ids: Vec<_> = registry
            .snapshot()
            .workers
            .iter()
            .map(|it| it.worker.id)
            .collect();
        for id in &ids[2..] {
            registry.set_facts(*id, crate::fleet::registry::tests::facts(&["large"]));
        }
        let mut rates = PrefillRates::default();
        see(&mut rates, &registry, &[40_000, 40_000, 5_000, 5_000], 0..9);
        assert_eq!(time_weights(&registry), [1.0; 4]);
        let learnt = |index: usize| registry.snapshot().workers[index].worker.prefill_rate();
        assert_eq!(learnt(3).map(|(rate, _)| rate), Some(5_000.0));
    }

    #[test]
    fn nothing_is_learnt_while_it_is_off() {
        let registry = registry(&["slow", "fast"]);
        bring_up(&registry, "m");
        let mut rates = PrefillRates::default();
        see(&mut rates, &registry, &[8_000, 32_000], 0..9);
        let snapshot = Arc::clone(&registry.snapshot());
        rates.update(&snapshot, false);
        assert_eq!(time_weights(&registry), [1.0, 1.0]);
    }
}
