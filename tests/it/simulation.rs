//! Runs the replica simulation with thousands of seeds: the invariants of background responses that
//! `src/ARCHITECTURE.md` lists hold after each step.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use crate::replica_simulation::{self, Counts, Scenario, Violation};
use warmroute::observe;

const SEEDS: u64 = 3_000;

/// The seeds of each of the other scenarios.
const SCENARIO_SEEDS: u64 = 600;

fn check(seed: u64) -> Counts {
    check_in(Scenario::Faults, seed)
}

fn check_in(scenario: Scenario, seed: u64) -> Counts {
    counted(
        scenario,
        seed,
        replica_simulation::run(scenario, seed, observe::now()),
    )
}

fn check_continued(scenario: Scenario, seed: u64) -> Counts {
    let result = replica_simulation::run_continued(scenario, seed, observe::now());
    counted(scenario, seed, result)
}

fn counted(scenario: Scenario, seed: u64, result: Result<Counts, Violation>) -> Counts {
    match result {
        Ok(counts) => counts,
        Err(broken) => panic!("{scenario:?}, seed {seed}: {broken}"),
    }
}

/// What happened in all seeds up to `seeds`.
fn check_all(scenario: Scenario, seeds: u64) -> Counts {
    check_each(seeds, |seed| check_in(scenario, seed))
}

fn check_each(seeds: u64, check: impl Fn(u64) -> Counts + Sync) -> Counts {
    let next = AtomicU64::new(0);
    let threads = thread::available_parallelism().map_or(2, usize::from);
    thread::scope(|scope| {
        let some = || {
            let mut counts = Counts::default();
            loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= seeds {
                    return counts;
                }
                counts.add(&check(seed));
            }
        };
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(some)).collect();
        let mut counts = Counts::default();
        for one in running {
            counts.add(&one.join().unwrap());
        }
        counts
    })
}

/// Each of these situations occurred.
fn occurred(counts: &[(&str, u64)], seeds: u64) {
    for (what, count) in counts {
        assert!(*count > seeds / 60, "{what}: {count} in {seeds} seeds");
    }
}

#[test]
fn whatever_fails_a_background_response_has_one_owner_one_end_and_each_event_once() {
    let counts = check_all(Scenario::Faults, SEEDS);
    let situations = [
        ("acknowledged", counts.acknowledged),
        ("completed", counts.completed),
        ("failed", counts.failed),
        ("cancelled", counts.cancelled),
        ("leases lost", counts.lost),
        ("run again", counts.rerun),
        ("given up", counts.given_up),
        ("released", counts.released),
        ("outputs stored by another", counts.outputs_kept),
        ("received from memory", counts.received_from_memory),
        ("resumed", counts.resumed),
        ("broken off", counts.broken),
        ("failed by an owner", counts.owner_failures),
        ("streams compared with outputs", counts.outputs_compared),
    ];
    occurred(&situations, SEEDS);
}

#[test]
fn whatever_fails_a_continued_response_has_one_text_whoever_wrote_which_part() {
    for (scenario, seeds) in [
        (Scenario::Faults, SEEDS),
        (Scenario::OnTime, SCENARIO_SEEDS),
        (Scenario::Nodes, SCENARIO_SEEDS),
    ] {
        let counts = check_each(seeds, |seed| check_continued(scenario, seed));
        let situations = [
            ("completed", counts.completed),
            ("gone on", counts.continued),
            ("whole answers of several replicas", counts.joined),
            ("streams compared with outputs", counts.outputs_compared),
        ];
        occurred(&situations, seeds);
    }
}

/// What else a failover may lose of a response is not promised.
#[test]
fn a_failover_of_the_store_tears_no_continued_text() {
    let counts = check_each(
        SCENARIO_SEEDS,
        |seed| match replica_simulation::run_continued(Scenario::Failover, seed, observe::now()) {
            Err(broken) if broken.is_of_text() => panic!("seed {seed}: {broken}"),
            Err(_) => Counts::default(),
            Ok(counts) => counts,
        },
    );
    let situations = [
        ("responses with lost writes", counts.lost_writes),
        ("whole answers of several replicas", counts.joined),
    ];
    occurred(&situations, SCENARIO_SEEDS);
}

#[test]
fn an_end_that_a_failover_of_the_store_lost_comes_back_while_its_writer_lives() {
    let counts = check_all(Scenario::Failover, 290);
    let situations = [
        ("responses with lost writes", counts.lost_writes),
        ("lost ends", counts.lost_ends),
    ];
    // A failover is a moment, and few responses end just before.
    occurred(&situations, 60);
}

/// A cancel that its owner had not seen is lost, and the response completes before the cancel is repeated: that is
/// not promised, and nothing else may come of it.
#[test]
fn seeds_of_lost_cancels_stay_well() {
    for seed in [132, 294] {
        check_in(Scenario::Failover, seed);
    }
}

#[test]
fn a_cancel_takes_a_second_and_a_take_over_twenty() {
    let counts = check_all(Scenario::OnTime, SCENARIO_SEEDS);
    let situations = [
        ("take-overs", counts.takeovers_on_time),
        ("cancels", counts.cancels_on_time),
    ];
    occurred(&situations, SCENARIO_SEEDS);
}

#[test]
fn a_store_of_several_nodes_keeps_its_promises_while_some_are_down() {
    let counts = check_all(Scenario::Nodes, SCENARIO_SEEDS);
    let situations = [
        ("refused by a node", counts.node_refusals),
        ("expired", counts.expired),
        ("run again", counts.rerun),
        ("cancelled", counts.cancelled),
    ];
    occurred(&situations, SCENARIO_SEEDS);
}

/// Also where its lock has run out, another turn came in between, or its replica was stopped for longer than the lease.
#[test]
fn a_turn_is_in_its_conversation_once_and_after_all_that_it_has_seen() {
    let situations = |counts: Counts| {
        [
            ("completed", counts.completed),
            ("failed", counts.failed),
            ("plain turns", counts.plain_turns),
            ("renewed locks", counts.locks_renewed),
            ("resumed locks", counts.locks_resumed),
            ("lost locks", counts.locks_lost),
            ("generated again", counts.new_histories),
        ]
    };
    let counts = check_all(Scenario::Turns, SEEDS);
    occurred(&situations(counts), SEEDS);
    let counts = check_each(SCENARIO_SEEDS, |seed| {
        check_continued(Scenario::Turns, seed)
    });
    occurred(&situations(counts), SCENARIO_SEEDS);
}

#[test]
fn a_store_that_grants_lost_locks_is_found() {
    let mut seeds = 0..SCENARIO_SEEDS;
    let is_found =
        |seed| replica_simulation::run_with_lost_locks_granted(seed, observe::now()).is_err();
    assert!(seeds.any(is_found));
}

#[test]
fn a_seed_is_the_same_every_time() {
    assert_eq!(check(7), check(7));
}

/// Each seed fails when the guard that it names is removed.
#[test]
fn seeds_that_have_found_something_stay_well() {
    for (seed, _guard) in [
        (
            13,
            "an owner's lease counts from when its heartbeat was sent",
        ),
        (317, "a takeover without a reply is retried"),
        (
            18,
            "a response whose output readers received is not run again",
        ),
        (23, "an append without a reply does not count as stored"),
        (240, "a finalization without a reply is retried"),
        (
            6,
            "a finalization that is too large is stored without output",
        ),
        (4, "readers receive only stored events"),
        (
            35,
            "a cancelled response keeps the output that readers received",
        ),
        (19, "a write needs the fencing token of the record"),
        (
            1_597,
            "a cancel while reading the events of another replica keeps those",
        ),
        (
            1_916,
            "a reply about an earlier run does not stop a newer one",
        ),
    ] {
        check(seed);
    }
}
