//! Runs the replica simulation with thousands of seeds: the invariants of background responses that
//! `src/ARCHITECTURE.md` lists hold after each step.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use crate::replica_simulation::{self, Counts};
use warmroute::observe;

const SEEDS: u64 = 3_000;

fn check(seed: u64) -> Counts {
    match replica_simulation::run(seed, observe::now()) {
        Ok(counts) => counts,
        Err(broken) => panic!("seed {seed}: {broken}"),
    }
}

#[test]
fn whatever_fails_a_background_response_has_one_owner_one_end_and_each_event_once() {
    let next = AtomicU64::new(0);
    let threads = thread::available_parallelism().map_or(2, usize::from);
    let counts = thread::scope(|scope| {
        let some = || {
            let mut counts = Counts::default();
            loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= SEEDS {
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
    });
    // Each of these situations occurred.
    for (what, count) in [
        ("acknowledged", counts.acknowledged),
        ("completed", counts.completed),
        ("failed", counts.failed),
        ("cancelled", counts.cancelled),
        ("leases lost", counts.lost),
        ("run again", counts.rerun),
        ("given up", counts.given_up),
        ("released", counts.released),
        ("outputs stored by another", counts.outputs_kept),
        ("received from memory", counts.told_from_memory),
        ("resumed", counts.resumed),
        ("broken off", counts.broken),
    ] {
        assert!(count > SEEDS / 60, "{what}: {count} in {SEEDS} seeds");
    }
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
