mod world;

use world::World;

fn run(seed: u64) {
    let mut world = World::new(seed);
    for _ in 0..400 {
        world.step();
    }
    world.settle();
}

#[test]
fn no_block_outlives_its_process_and_all_settles() {
    let seeds = std::env::var("WARMROUTE_STREAM_SEEDS")
        .ok()
        .and_then(|seeds| seeds.parse().ok())
        .unwrap_or(2_000);
    let mut failed = Vec::new();
    for seed in 0..seeds {
        if let Err(panic) = std::panic::catch_unwind(|| run(seed)) {
            let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
            let first = text.lines().next().unwrap_or_default().to_owned();
            failed.push((seed, first));
        }
    }
    assert!(
        failed.is_empty(),
        "{} seeds: {:?}",
        failed.len(),
        &failed[..failed.len().min(10)]
    );
}

#[test]
fn one_seed() {
    if let Ok(seed) = std::env::var("WARMROUTE_STREAM_SEED") {
        run(seed.parse().unwrap());
    }
}
