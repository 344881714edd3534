use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::kv::text_block;
use crate::observe;
use crate::observe::metrics::Registry;

const TOKENS: u32 = 10;

fn index(settings: Settings) -> PredictedIndex {
    PredictedIndex::new(settings, Metrics::new(&Registry::default()), observe::now())
}

fn prompt(locals: &[u64]) -> Vec<Block> {
    text_block::chain(
        text_block::chain_root("m", None),
        locals.iter().map(|local| (*local, TOKENS)),
    )
}

fn depths(index: &PredictedIndex, prompt: &[Block]) -> Vec<(u32, u32)> {
    index
        .overlap(prompt, 8, 0)
        .iter()
        .map(|owner| (owner.worker.0, owner.blocks))
        .collect()
}

#[test]
fn the_longest_prefix_comes_first() {
    let index = index(Settings::default());
    let now = index.created;
    index.record(now, WorkerId(1), 0, &prompt(&[1, 2]));
    index.record(now, WorkerId(2), 0, &prompt(&[1, 2, 3, 4]));
    index.record(now, WorkerId(3), 0, &prompt(&[1, 9]));
    assert_eq!(
        depths(&index, &prompt(&[1, 2, 3, 5])),
        [(2, 3), (1, 2), (3, 1)]
    );
    assert_eq!(depths(&index, &prompt(&[7])), []);
    assert_eq!(depths(&index, &[]), []);
    assert_eq!(index.depth(WorkerId(1), &prompt(&[1, 2, 3])), 2);
}

#[test]
fn the_ranks_of_a_worker_are_caches_of_their_own_and_are_forgotten_with_it() {
    let index = index(Settings::default());
    let worker = WorkerId(1);
    let [first, second] = [0, 1].map(|rank| worker.at_rank(rank).unwrap());
    index.record(index.created, first, 0, &prompt(&[1, 2]));
    index.record(index.created, second, 0, &prompt(&[1]));
    let prompt = prompt(&[1, 2, 3]);
    let lengths = [worker, first, second].map(|owner| index.depth(owner, &prompt));
    assert_eq!(lengths, [0, 2, 1]);
    assert_eq!(index.size(worker), (3, u64::from(3 * TOKENS)));
    index.remove_expired(index.created, |listed| listed == worker);
    assert_eq!(index.size(worker).0, 3);
    index.forget(index.created, worker);
    assert_eq!(
        (index.size(worker), depths(&index, &prompt)),
        ((0, 0), vec![])
    );
}

/// A worker that leaves is removed with its LRU locked, so whoever waits for that lock must not hold the map's.
#[test]
fn whoever_asks_for_the_size_of_a_worker_that_leaves_does_not_keep_it_from_leaving() {
    let index = index(Settings::default());
    let worker = WorkerId(1);
    index.record(index.created, worker, 0, &prompt(&[1, 2]));
    let lru = index.lru(worker);
    std::thread::scope(|scope| {
        let locked = lru.lock();
        let known = Arc::strong_count(&lru);
        let asking = scope.spawn(|| index.size(worker));
        let waits = |_: &u32| {
            std::thread::yield_now();
            Arc::strong_count(&lru) == known
        };
        assert!((0..10_000_000).take_while(waits).count() < 10_000_000);
        assert!(index.lrus.remove(&worker).is_some());
        drop(locked);
        assert_eq!(asking.join().unwrap(), (2, u64::from(2 * TOKENS)));
    });
}

#[test]
fn among_owners_of_the_same_prefix_the_seed_picks() {
    let index = index(Settings::default());
    for worker in 0..10 {
        index.record(index.created, WorkerId(worker), 0, &prompt(&[1]));
    }
    let first = |seed| index.overlap(&prompt(&[1, 2]), 2, seed)[0].worker.0;
    assert_eq!((first(3), first(14)), (3, 4));
    assert_eq!(index.overlap(&prompt(&[1, 2]), 2, 9).len(), 2);
}

#[test]
fn a_full_worker_loses_the_end_of_the_least_recently_used_prompt() {
    let index = index(Settings {
        tokens_per_worker: 50,
        ..Settings::default()
    });
    let worker = WorkerId(1);
    index.record(index.created, worker, 0, &prompt(&[1, 2, 3]));
    index.record(index.created, worker, 0, &prompt(&[4, 5]));
    index.record(index.created, worker, 0, &prompt(&[1]));
    index.record(index.created, worker, 0, &prompt(&[6]));
    assert_eq!(index.depth(worker, &prompt(&[1, 2, 3])), 2);
    assert_eq!(index.depth(worker, &prompt(&[4, 5])), 2);
    assert_eq!(index.size(worker), (5, 50));
    // The size that the engine reports wins over the setting.
    index.record(index.created, worker, 20, &prompt(&[6]));
    assert_eq!(index.size(worker), (2, 20));
}

#[test]
fn blocks_not_used_for_long_are_dropped() {
    let index = index(Settings {
        max_age: Duration::from_secs(60),
        ..Settings::default()
    });
    let worker = WorkerId(1);
    index.record(index.created, worker, 0, &prompt(&[1, 2]));
    index.record(
        index.created + Duration::from_secs(40),
        worker,
        0,
        &prompt(&[1]),
    );
    index.record(
        index.created + Duration::from_secs(90),
        worker,
        0,
        &prompt(&[9]),
    );
    assert_eq!(index.depth(worker, &prompt(&[1, 2])), 1);
}

#[test]
fn the_router_s_limit_is_shared_by_the_workers() {
    let index = index(Settings {
        max_blocks: 6,
        ..Settings::default()
    });
    for worker in 0..3 {
        index.record(index.created, WorkerId(worker), 0, &prompt(&[1, 2, 3, 4]));
        index.record(index.created, WorkerId(worker), 0, &prompt(&[1, 2, 3, 4]));
    }
    assert_eq!(index.size(WorkerId(2)), (2, 20));
}

#[test]
fn blocks_of_a_request_that_was_not_accepted_are_taken_back() {
    let index = index(Settings::default());
    let worker = WorkerId(1);
    let cached = |locals: &[u64]| {
        let recorded = index.record(index.created, worker, 0, &prompt(locals));
        recorded.cached_blocks
    };
    assert_eq!(cached(&[1, 2]), 0);
    assert_eq!(cached(&[1, 2, 3, 4]), 2);
    index.retract(worker, &prompt(&[1, 2, 3, 4]), 2);
    assert_eq!(index.depth(worker, &prompt(&[1, 2, 3, 4])), 2);
    assert_eq!(index.size(worker), (2, 20));
    assert_eq!(cached(&[1, 2]), 2);
    // Another request went on after the block 3 before the first was refused.
    assert_eq!(cached(&[1, 2, 3]), 2);
    assert_eq!(cached(&[1, 2, 3, 4]), 3);
    index.retract(worker, &prompt(&[1, 2, 3]), 2);
    assert_eq!(index.depth(worker, &prompt(&[1, 2, 3, 4])), 4);
}

#[test]
fn of_a_prompt_longer_than_the_cache_only_the_fitting_part_is_recorded() {
    let index = index(Settings {
        tokens_per_worker: 30,
        ..Settings::default()
    });
    let worker = WorkerId(1);
    index.record(index.created, worker, 0, &prompt(&[1, 2, 3, 4, 5]));
    assert_eq!(index.depth(worker, &prompt(&[1, 2, 3, 4, 5])), 3);
}

/// Found by `it_equals_a_plain_lru`: a repeated prompt did not move the clock of use.
#[test]
fn a_repeated_prompt_counts_as_used() {
    let index = index(Settings {
        tokens_per_worker: 70,
        ..Settings::default()
    });
    let worker = WorkerId(2);
    let read: [&[u64]; 6] = [
        &[0, 2, 2],
        &[2, 1],
        &[2, 1],
        &[0, 2, 2],
        &[2, 1],
        &[1, 0, 0, 0, 0],
    ];
    for locals in read {
        index.record(index.created, worker, 0, &prompt(locals));
    }
    assert_eq!(index.depth(worker, &prompt(&[2, 1])), 2);
    assert_eq!(index.depth(worker, &prompt(&[0, 2, 2])), 0);
}

#[test]
fn old_blocks_and_workers_that_left_are_dropped() {
    let index = index(Settings {
        max_age: Duration::from_secs(60),
        ..Settings::default()
    });
    index.record(index.created, WorkerId(1), 0, &prompt(&[1]));
    index.record(index.created, WorkerId(2), 0, &prompt(&[1]));
    index.remove_expired(index.created, |worker| worker == WorkerId(1));
    assert_eq!(depths(&index, &prompt(&[1])), [(1, 1)]);
    index.remove_expired(index.created + Duration::from_secs(90), |_| true);
    assert_eq!(depths(&index, &prompt(&[1])), []);
    assert_eq!(index.lru_count.load(Relaxed), 1);
}

#[test]
fn a_forgotten_worker_leaves_nothing() {
    let index = index(Settings::default());
    index.record(index.created, WorkerId(1), 0, &prompt(&[1, 2]));
    index.record(index.created, WorkerId(2), 0, &prompt(&[1]));
    index.forget(index.created, WorkerId(1));
    assert_eq!(depths(&index, &prompt(&[1, 2])), [(2, 1)]);
    index.forget(index.created, WorkerId(2));
    assert!(index.owners.is_empty());
    assert_eq!(index.metrics.blocks.get(), 0);
}

#[derive(Clone, Debug)]
enum Step {
    Record { worker: u32, prompt: Vec<u64> },
    Forget { worker: u32 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (0u32..3, proptest::collection::vec(0u64..3, 1..7))
            .prop_map(|(worker, prompt)| Step::Record { worker, prompt }),
        1 => (0u32..3).prop_map(|worker| Step::Forget { worker }),
    ];
    proptest::collection::vec(step, 0..60)
}

proptest! {
    /// Against a plain LRU: a list of prefixes in order of use, from which the first is dropped.
    #[test]
    fn it_equals_a_plain_lru(steps in steps(), capacity in 1usize..12) {
        let index = index(Settings { tokens_per_worker: capacity as u64 * u64::from(TOKENS), ..Settings::default() });
        let mut model: BTreeMap<u32, Vec<Vec<u64>>> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Forget { worker } => {
                    index.forget(index.created, WorkerId(worker));
                    model.remove(&worker);
                }
                Step::Record { worker, prompt: locals } => {
                    index.record(index.created, WorkerId(worker), 0, &prompt(&locals));
                    let cached = model.entry(worker).or_default();
                    for end in (1..=locals.len()).rev() {
                        cached.retain(|prefix| prefix != &locals[..end]);
                        cached.push(locals[..end].to_vec());
                    }
                    let surplus = cached.len().saturating_sub(capacity);
                    cached.drain(..surplus);
                }
            }
            for worker in 0..3 {
                let cached = model.get(&worker).cloned().unwrap_or_default();
                prop_assert_eq!(index.size(WorkerId(worker)).0, cached.len());
                for prefix in &cached {
                    prop_assert_eq!(index.depth(WorkerId(worker), &prompt(prefix)) as usize, prefix.len());
                }
            }
            let asked = prompt(&[0, 1, 2, 0]);
            let mut expected: Vec<(u32, u32)> = (0..3)
                .map(|worker| (worker, index.depth(WorkerId(worker), &asked)))
                .filter(|(_, depth)| *depth > 0)
                .collect();
            expected.sort_by_key(|(worker, depth)| (std::cmp::Reverse(*depth), *worker));
            prop_assert_eq!(depths(&index, &asked), expected);
        }
    }
}

#[test]
fn a_copy_predicts_the_same_in_the_same_order_of_use_and_ages_on() {
    let settings = Settings {
        max_age: Duration::from_secs(100),
        ..Settings::default()
    };
    let (source, copy) = (index(settings.clone()), index(settings));
    let worker = WorkerId(1);
    let at = |seconds| source.created + Duration::from_secs(seconds);
    source.record(at(1), worker, 0, &prompt(&[1, 2, 3]));
    source.record(at(60), worker, 0, &prompt(&[1, 9]));
    let blocks = source.copy(at(90), worker, 100);
    assert_eq!(blocks.len(), 4);
    assert_eq!((blocks[0].age_s, blocks[3].age_s), (30, 89));
    // What it recorded itself counts as used later, and is not counted twice.
    let now = copy.created;
    let own = WorkerId(5);
    copy.record(now, own, 0, &prompt(&[1, 7]));
    assert_eq!(copy.import(now, own, 0, &blocks), 3);
    assert_eq!(copy.import(now, own, 0, &blocks), 0);
    assert_eq!(copy.size(own), (5, 50));
    for known in [[1, 2, 3].as_slice(), &[1, 9], &[1, 7]] {
        assert_eq!(copy.depth(own, &prompt(known)) as usize, known.len());
    }
    let later = now + Duration::from_secs(12);
    copy.remove_expired(later, |_| true);
    assert_eq!(copy.depth(own, &prompt(&[1, 2, 3])), 1);
    assert_eq!(copy.depth(own, &prompt(&[1, 9])), 2);
    // The least recently used ones go first, the end of a prompt before its start.
    copy.import(now, own, 0, &blocks);
    copy.record(now, own, 30, &prompt(&[1, 7]));
    assert_eq!(copy.depth(own, &prompt(&[1, 7])), 2);
    assert_eq!(copy.depth(own, &prompt(&[1, 2, 3])), 1);
}

#[test]
fn a_copy_that_is_cut_off_has_no_block_without_those_before_it() {
    let (source, copy) = (index(Settings::default()), index(Settings::default()));
    let worker = WorkerId(1);
    source.record(source.created, worker, 0, &prompt(&[1, 2, 3]));
    source.record(source.created, worker, 0, &prompt(&[1, 4, 5]));
    for max in 0..=5 {
        copy.forget(copy.created, worker);
        let blocks = source.copy(source.created, worker, max);
        copy.import(copy.created, worker, 0, &blocks);
        let (a, b) = (prompt(&[1, 2, 3]), prompt(&[1, 4, 5]));
        let known = copy.depth(worker, &a).max(1) + copy.depth(worker, &b) - 1;
        assert_eq!(known as usize, max);
    }
}
