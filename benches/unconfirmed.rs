//! Unconfirmed blocks: what one request costs.
//!
//! Budget: for a prompt of 128k tokens in blocks of 16, 30 µs for its prefix keys, 10 µs to look it up
//! and 50 µs to insert and remove it, with 50 other unconfirmed prompts at each of 1,000 workers.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use warmroute::ids::WorkerId;
use warmroute::kv::block::{self, LocalHash};
use warmroute::kv::unconfirmed::{self, Metrics, Settings, UnconfirmedBlocks};
use warmroute::observe::metrics::Registry;

/// A system prompt of `system` blocks that all users share, then the user's own blocks up to `blocks`.
fn prompt(user: u32, system: u32, blocks: u32) -> Vec<LocalHash> {
    let own = (system..blocks).map(|block| block::hash_block(&[user + 1, block]));
    let shared = (0..system).map(|block| block::hash_block(&[0, block]));
    shared.chain(own).collect()
}

fn bench(criterion: &mut Criterion) {
    let settings = Settings {
        max_blocks: 10_000_000,
        ..Settings::default()
    };
    let unconfirmed = UnconfirmedBlocks::new(settings, Metrics::new(&Registry::default()));
    let root = block::chain_root(None, None);
    let prompts: Vec<_> = (0..50_000u32)
        .map(|user| {
            let keys = unconfirmed::prefix_keys(root, &prompt(user, 8, 64));
            unconfirmed.insert(WorkerId(user % 1_000), &keys)
        })
        .collect();
    let mut group = criterion.benchmark_group("unconfirmed");
    for blocks in [128, 8_000] {
        let locals = prompt(77, 8, blocks);
        let keys = unconfirmed::prefix_keys(root, &locals);
        group.bench_function(format!("prefix_keys/{blocks}"), |bencher| {
            bencher.iter(|| unconfirmed::prefix_keys(root, black_box(&locals)));
        });
        group.bench_function(format!("overlap/{blocks}"), |bencher| {
            bencher.iter(|| black_box(unconfirmed.overlap(black_box(&keys), 8, 0)));
        });
        group.bench_function(format!("insert/{blocks}"), |bencher| {
            bencher.iter(|| drop(unconfirmed.insert(WorkerId(5), black_box(&keys))));
        });
    }
    group.finish();
    drop(prompts);
}

criterion_group!(benches, bench);
criterion_main!(benches);
