mod facts;
mod peer_trees;
mod play;
mod responses;
mod world;

use world::World;

/// Seeds that one run of the tests tries.
const SEEDS: u64 = 1_000;

fn run(seed: u64) {
    let mut world = World::new(seed);
    for _ in 0..400 {
        world.step();
    }
    world.settle();
}

/// `WARMROUTE_STREAM_SEEDS` tries more of them.
#[test]
fn no_block_outlives_its_process_and_all_settles() {
    let seeds = std::env::var("WARMROUTE_STREAM_SEEDS")
        .ok()
        .and_then(|seeds| seeds.parse().ok())
        .unwrap_or(SEEDS);
    let mut failed = Vec::new();
    for seed in 0..seeds {
        if let Err(panic) = std::panic::catch_unwind(|| run(seed)) {
            let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
            failed.push((seed, text.lines().next().unwrap_or_default().to_owned()));
        }
    }
    let shown = &failed[..failed.len().min(10)];
    assert!(failed.is_empty(), "{} seeds: {shown:?}", failed.len());
}

/// The seed in `WARMROUTE_STREAM_SEED`, with all that happened.
#[test]
fn one_seed() {
    if let Ok(seed) = std::env::var("WARMROUTE_STREAM_SEED") {
        run(seed.parse().unwrap());
    }
}
