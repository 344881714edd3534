//! Learns the speeds of the fleet's workers. Pure: its caller takes the snapshots.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::learner::Learner;
use super::overhead::Overhead;
use super::own::OwnSpeed;
use crate::fleet::{Snapshot, Status, with_different_members};
use crate::ids::{Model, WorkerId};

/// Workers of one model with the same value of this label are taken to be alike.
const HARDWARE: &str = "hardware";

#[derive(Debug, Default)]
pub struct Speeds {
    workers: BTreeMap<WorkerId, Learnt>,
    /// What is learnt of the workers of a model with the same hardware.
    pools: BTreeMap<PoolKey, Learner>,
}

/// The workers that are taken to be alike: of one model, on the same hardware.
type PoolKey = (Option<Model>, Option<Arc<str>>);

fn pool_of(status: &Status) -> PoolKey {
    let hardware = status.worker.labels.get(HARDWARE).cloned();
    (status.facts.base.clone(), hardware)
}

#[derive(Debug, Default)]
struct Learnt {
    /// The engine process that it is about.
    incarnation: u64,
    own: OwnSpeed,
    overhead: Overhead,
}

impl Speeds {
    /// To be called once a second: takes what was seen, and sets the workers' speeds and their usual requests.
    pub fn update(&mut self, snapshot: &Snapshot) {
        let mut before = std::mem::take(&mut self.workers);
        for status in &snapshot.workers {
            let worker = &status.worker;
            worker.load.see_requests();
            let rows = worker.seen.take();
            let mut learnt = before.remove(&worker.id).unwrap_or_default();
            if learnt.incarnation != status.incarnation {
                learnt = Learnt {
                    incarnation: status.incarnation,
                    ..Learnt::default()
                };
            }
            let pool = self.pools.entry(pool_of(status)).or_default();
            if let Some((speed, samples)) = worker.take_peer_speed() {
                learnt.own.on_peer(pool, &speed, samples);
            }
            learnt
                .overhead
                .on_rows(&rows.firsts, &worker.load.speed.get());
            worker.overhead.set(learnt.overhead.seconds());
            learnt.own.on_rows(pool, rows);
            self.workers.insert(worker.id, learnt);
        }
        for status in &snapshot.workers {
            let worker = &status.worker;
            let pool = self.pools.get(&pool_of(status));
            let pool = pool.map(Learner::speed).unwrap_or_default();
            if let Some(learnt) = self.workers.get_mut(&worker.id) {
                let speed = learnt.own.speed(&pool);
                worker.set_speed(&speed, learnt.own.samples());
            }
        }
        self.forget_pools(snapshot);
        set_group_speeds(snapshot);
    }

    /// A pool without workers is kept only as long as its model is there.
    fn forget_pools(&mut self, snapshot: &Snapshot) {
        if self.pools.len() > snapshot.workers.len().max(16) {
            let is_there = |base: &Option<Model>| {
                let mut workers = snapshot.workers.iter();
                workers.any(|status| status.facts.base == *base)
            };
            self.pools.retain(|(base, _), _| is_there(base));
        }
    }
}

/// A model and its adapters share their members.
fn set_group_speeds(snapshot: &Snapshot) {
    for group in with_different_members(snapshot.models.values()) {
        group.set_speed();
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::time::Duration;

    use super::*;
    use crate::fleet::in_flight::InFlight;
    use crate::fleet::registry::Registry;
    use crate::fleet::registry::tests::{bring_up, facts, registry};
    use crate::fleet::speed::{LoadNow, Speed};

    /// Lets each worker compute prompts of half a second at a rate, for `seconds`.
    fn see(speeds: &mut Speeds, registry: &Registry, rates: &[u32], seconds: Range<u64>) {
        for second in seconds {
            let snapshot = registry.snapshot().clone();
            for (status, rate) in snapshot.workers.iter().zip(rates) {
                let at = Duration::from_secs(second);
                let load = LoadNow::default();
                let sent = status.worker.seen.on_sent(at, &load, true);
                let first = at + Duration::from_millis(500);
                let seen = &status.worker.seen;
                seen.on_first_token(first, &sent, rate / 2, &load);
            }
            speeds.update(&snapshot);
        }
    }

    fn rates(registry: &Registry) -> Vec<f64> {
        let snapshot = registry.snapshot();
        let workers = snapshot.workers.iter();
        workers
            .map(|status| status.worker.load.speed.get().rate())
            .collect()
    }

    #[test]
    fn the_prompts_that_wait_are_those_of_all_workers_on_average_over_the_last_seconds() {
        let registry = registry(&["a", "b"]);
        bring_up(&registry, "m");
        let mut speeds = Speeds::default();
        let waiting = |speeds: &mut Speeds, seconds| {
            for _ in 0..seconds {
                speeds.update(&registry.snapshot());
            }
            registry.snapshot().models["m"].speed.waiting_prompts.get()
        };
        // One prompt and a half are not computed yet; of the third all is cached.
        let worker = registry.snapshot().workers[0].worker.clone();
        let mut requests = [(200, 0), (10_000, 5_000), (300, 300)]
            .map(|(tokens, cached)| InFlight::new(worker.clone(), tokens, cached));
        let first = waiting(&mut speeds, 1);
        assert!(is_near(first, 0.6), "{first}");
        let usual = waiting(&mut speeds, 20);
        assert!((1.49..1.51).contains(&usual), "{usual}");
        requests[0].on_first_token();
        let usual = waiting(&mut speeds, 20);
        assert!((0.49..0.51).contains(&usual), "{usual}");
        drop(requests);
        assert!(waiting(&mut speeds, 20) < 0.01);
    }

    fn is_near(found: f64, expected: f64) -> bool {
        (expected * 0.8..=expected * 1.25).contains(&found)
    }

    #[test]
    fn alike_workers_share_what_is_learnt_and_a_different_one_has_its_own() {
        let registry = registry(&["a", "b", "slow"]);
        bring_up(&registry, "m");
        let mut speeds = Speeds::default();
        see(&mut speeds, &registry, &[40_000, 40_000, 4_000], 0..20);
        let early = rates(&registry);
        assert_eq!((early[0], early[1]), (early[2], early[2]));
        see(&mut speeds, &registry, &[40_000, 40_000, 4_000], 20..90);
        let found = rates(&registry);
        assert!(
            is_near(found[0], 40_000.0) && is_near(found[1], 40_000.0),
            "{found:?}"
        );
        assert!(is_near(found[2], 4_000.0), "{found:?}");
        let group = registry.snapshot().models["m"].clone();
        let mean = 1.0 / group.speed.mean_prompt_token.get();
        assert!(is_near(mean, 28_000.0), "{mean}");
        assert!(group.speed.min_prompt_token.get() <= 1.0 / found[0]);
    }

    #[test]
    fn a_restarted_engine_counts_as_those_alike_until_it_is_known() {
        let registry = registry(&["a", "b", "slow"]);
        bring_up(&registry, "m");
        let mut speeds = Speeds::default();
        see(&mut speeds, &registry, &[40_000, 40_000, 4_000], 0..90);
        let slow = registry.snapshot().workers[2].worker.clone();
        registry.restarted(slow.id);
        speeds.update(&registry.snapshot());
        let found = rates(&registry);
        assert!(found[2] > 8_000.0, "{found:?}");
    }

    #[test]
    fn what_another_replica_has_learnt_counts_until_it_is_known_here() {
        let registry = registry(&["a", "b"]);
        bring_up(&registry, "m");
        let mut speeds = Speeds::default();
        let learnt = Speed {
            prompt_token: 1.0 / 40_000.0,
            ..Speed::default()
        };
        registry.snapshot().workers[0]
            .worker
            .on_peer_speed(&learnt, 500, 64);
        speeds.update(&registry.snapshot());
        let found = rates(&registry);
        assert!(
            found.iter().all(|rate| is_near(*rate, 40_000.0)),
            "{found:?}"
        );
        assert_eq!(registry.snapshot().workers[0].worker.slots(), 64);
        see(&mut speeds, &registry, &[8_000, 8_000], 0..120);
        let later = Speed {
            prompt_token: 1.0 / 90_000.0,
            ..learnt
        };
        registry.snapshot().workers[0]
            .worker
            .on_peer_speed(&later, 500, 0);
        speeds.update(&registry.snapshot());
        let found = rates(&registry);
        assert!(
            found.iter().all(|rate| is_near(*rate, 8_000.0)),
            "{found:?}"
        );
    }

    #[test]
    fn models_are_learnt_each_with_its_own_workers() {
        let registry = registry(&["small", "large"]);
        bring_up(&registry, "small");
        let large = registry.snapshot().workers[1].worker.id;
        registry.set_facts(large, facts(&["large"]));
        let mut speeds = Speeds::default();
        see(&mut speeds, &registry, &[60_000, 3_000], 0..60);
        let found = rates(&registry);
        assert!(
            is_near(found[0], 60_000.0) && is_near(found[1], 3_000.0),
            "{found:?}"
        );
    }
}
