//! What is on its way to workers: a request's own part of it.
//!
//! Budget: for a prompt of 128k tokens in blocks of 16, 30 µs for its marks, 10 µs to look it up and
//! 50 µs to count it and take it back, with 50 other prompts on their way to each of 1,000 workers.

use std::hint::black_box;
use std::time::Instant;

use criterion::{Criterion, criterion_group, criterion_main};
use warmroute::ids::WorkerId;
use warmroute::kv::block::{self, LocalHash};
use warmroute::kv::unconfirmed::{self, Metrics, Settings, UnconfirmedBlocks};
use warmroute::observe::metrics::Registry;

/// A system prompt of `system` blocks that all share, and blocks of one's own up to `blocks`.
fn prompt(user: u32, system: u32, blocks: u32) -> Vec<LocalHash> {
    let own = (system..blocks).map(|place| block::hash_block(&[user + 1, place]));
    let shared = (0..system).map(|place| block::hash_block(&[0, place]));
    shared.chain(own).collect()
}

#[expect(clippy::disallowed_methods, reason = "a bench has no tokio clock")]
fn bench(criterion: &mut Criterion) {
    let now = Instant::now();
    let settings = Settings {
        marks_max: 10_000_000,
        ..Settings::default()
    };
    let unconfirmed = UnconfirmedBlocks::new(settings, Metrics::new(&Registry::default()), now);
    let root = block::chain_root(None, None);
    let coming: Vec<_> = (0..50_000u32)
        .map(|user| {
            let marks = unconfirmed::prefix_keys(root, &prompt(user, 8, 64));
            unconfirmed.insert(WorkerId(user % 1_000), &marks)
        })
        .collect();
    let mut group = criterion.benchmark_group("unconfirmed");
    for blocks in [128, 8_000] {
        let locals = prompt(77, 8, blocks);
        let marks = unconfirmed::prefix_keys(root, &locals);
        group.bench_function(format!("marks/{blocks}"), |bencher| {
            bencher.iter(|| unconfirmed::prefix_keys(root, black_box(&locals)));
        });
        group.bench_function(format!("overlap/{blocks}"), |bencher| {
            bencher.iter(|| black_box(unconfirmed.overlap(now, black_box(&marks), 8)));
        });
        group.bench_function(format!("expect/{blocks}"), |bencher| {
            bencher.iter(|| drop(unconfirmed.insert(WorkerId(5), black_box(&marks))));
        });
    }
    group.finish();
    drop(coming);
}

criterion_group!(benches, bench);
criterion_main!(benches);
