//! Replicas over one store, thousands of times, each time with other faults: what `src/ARCHITECTURE.md` says
//! of background responses is true after each step.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use warmroute::observe;
use warmroute::sim::replicas::{self, Met};

const SEEDS: u64 = 3_000;

fn check(seed: u64) -> Met {
    match replicas::run(seed, observe::now()) {
        Ok(met) => met,
        Err(broken) => panic!("seed {seed}: {broken}"),
    }
}

#[test]
fn whatever_fails_a_background_response_has_one_owner_one_end_and_each_event_once() {
    let next = AtomicU64::new(0);
    let threads = thread::available_parallelism().map_or(2, usize::from);
    let met = thread::scope(|scope| {
        let some = || {
            let mut met = Met::default();
            loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= SEEDS {
                    return met;
                }
                met.add(&check(seed));
            }
        };
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(some)).collect();
        let mut met = Met::default();
        for one in running {
            met.add(&one.join().unwrap());
        }
        met
    });
    // Each of these was put to the test.
    for (what, count) in [
        ("acknowledged", met.acknowledged),
        ("completed", met.completed),
        ("failed", met.failed),
        ("cancelled", met.cancelled),
        ("leases lost", met.lost),
        ("begun again", met.rerun),
        ("given up", met.given_up),
        ("handed back", met.released),
        ("told from memory", met.told_from_memory),
        ("resumed", met.resumed),
        ("broken off", met.broken),
    ] {
        assert!(count > SEEDS / 50, "{what}: {count} in {SEEDS} seeds");
    }
}

#[test]
fn a_seed_is_the_same_every_time() {
    assert_eq!(check(7), check(7));
}

/// Each of these fails where one guard is taken out.
#[test]
fn seeds_that_have_found_something_stay_well() {
    for (seed, _guard) in [
        (13, "an owner's lease counts from when its beat was sent"),
        (317, "an adoption that was not answered is asked for again"),
        (21, "who lost the lease goes on under another name"),
        (18, "what readers were told words of is not begun again"),
        (
            23,
            "an append that was not answered is not taken for stored",
        ),
        (294, "who lost the lease stops what runs"),
        (240, "an end that was not answered is stored again"),
        (6, "an end too large to keep is made without its output"),
        (4, "nobody is told what is not stored"),
        (35, "a cancelled response is left with what was told of it"),
        (19, "a write is done under the record's fence alone"),
        (
            1_597,
            "a cancel while another replica's events are read leaves those",
        ),
        (
            1_916,
            "an answer about what has been taken over again does not stop it",
        ),
    ] {
        check(seed);
    }
}
