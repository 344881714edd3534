//! The index over reported blocks: storing, removing, looking up, at 100 workers of 1,000 blocks each
//! that share a system prompt. Prints the memory that a membership takes, as it is filled and after all
//! was removed and stored again.
//!
//! Budget: 200,000 blocks/s of events on one core next to requests, so 5 µs a block; a lookup of a
//! long prompt under 10 µs.
//!
//! Beside the peer's index (kv-index 2.0.0, ChainIndex) on the same operations, 20,000 blocks a worker,
//! one public trace four times over; 2 cores, shared and overloaded (up to 18 runnable threads),
//! 2026-11-21. Medians of an operation over 5 or 3 rounds; runs differed by a factor of two, so these
//! are first figures and not a verdict:
//!
//! | workers | index | stored ns/block | removed | lookup mean | p50 | p99 | bytes/membership | beside a writer: apply, lookup |
//! |---|---|---|---|---|---|---|---|---|
//! | 8 | ChainIndex | 26.6 | 49.6 | 250 | 198 | 1,018 | 98 | 43.8, 689 |
//! | 8 | this | 38.5 | 44.5 | 254 | 232 | 616 | 39 | 48.1, 1,117 |
//! | 8, later | ChainIndex | 38.2 | 74.6 | 297 | 213 | 1,305 | 98 | 57.5, 2,421 |
//! | 8, later | this | 77.1 | 63.3 | 402 | 260 | 2,712 | 37 | 66.4, 3,984 |
//! | 64 | ChainIndex | 42.9 | 86.5 | 625 | 208 | 7,889 | 56 | 75.2, 4,301 |
//! | 64 | this | 131.8 | 72.6 | 800 | 317 | 9,919 | 38 | 93.6, 2,690 |
//!
//! "Later" is with the table of names as it is now; 64 workers were not measured again beside the peer,
//! and 512 not at all. Stores are slower than the peer's: that is open.

use std::hint::black_box;
use std::num::NonZeroU32;
use std::sync::Arc;

use criterion::BatchSize;
use criterion::Criterion;
use criterion::Throughput;
use criterion::criterion_group;
use criterion::criterion_main;
use warmroute::ids::WorkerId;
use warmroute::kv::block::Local;
use warmroute::kv::block::Root;
use warmroute::kv::block::root;
use warmroute::kv::event::Name;
use warmroute::kv::event::Tier;
use warmroute::kv::forest::Forest;
use warmroute::kv::forest::Settings;
use warmroute::kv::index::Index;
use warmroute::kv::radix::After;
use warmroute::kv::radix::Copies;
use warmroute::kv::radix::NewBlock;
use warmroute::kv::radix::Tree;
use warmroute::observe::metrics::Registry;

const WORKERS: u32 = 100;
const CHAINS: u64 = 10;
const BLOCKS: u64 = 100;
/// Of each chain, the same for all.
const SHARED: u64 = 20;

fn start() -> Root {
    root(None, None)
}

/// One worker's conversation.
fn chain(worker: u32, number: u64) -> Vec<NewBlock> {
    let mut random = fastrand::Rng::with_seed(1);
    let new = |at| {
        if at == SHARED {
            random = fastrand::Rng::with_seed(u64::from(worker) << 32 | number);
        }
        NewBlock {
            name: Name(random.u64(..)),
            local: Local(random.u64(..)),
        }
    };
    (0..BLOCKS).map(new).collect()
}

fn fill(trees: &mut [Tree], chains: &[Vec<Vec<NewBlock>>]) {
    for (tree, chains) in trees.iter_mut().zip(chains) {
        for chain in chains {
            tree.store(After::Root(start()), chain, Tier::Gpu, Copies::Counted)
                .expect("it begins at the root");
        }
    }
}

fn empty(trees: &mut [Tree], chains: &[Vec<Vec<NewBlock>>]) {
    for (tree, chains) in trees.iter_mut().zip(chains) {
        for chain in chains {
            let names: Vec<Name> = chain.iter().rev().map(|block| block.name).collect();
            tree.remove(&names, Tier::Gpu);
        }
    }
}

fn planted() -> (Arc<Forest>, Arc<Index>, Vec<Tree>) {
    let forest = Forest::new(Settings::default(), &Registry::default());
    let index = forest.index(&"m".into(), NonZeroU32::MIN);
    let plant = |worker| {
        let mut tree = index.plant(WorkerId(worker), 0);
        tree.set_scoring(true);
        tree
    };
    let trees = (0..WORKERS).map(plant).collect();
    (forest, index, trees)
}

#[expect(clippy::print_stdout, reason = "a bench tells what it measured")]
fn radix(criterion: &mut Criterion) {
    let chains: Vec<Vec<Vec<NewBlock>>> = (0..WORKERS)
        .map(|worker| (0..CHAINS).map(|number| chain(worker, number)).collect())
        .collect();
    let (forest, index, mut trees) = planted();
    for when in ["filled", "after churn"] {
        fill(&mut trees, &chains);
        let memberships: u64 = trees.iter().map(Tree::len).sum();
        println!(
            "{when}: {} bytes for {memberships} memberships of {} blocks, {:.1} each",
            index.memory_bytes(),
            index.len(),
            index.memory_bytes() as f64 / memberships as f64
        );
        empty(&mut trees, &chains);
    }

    let mut group = criterion.benchmark_group("radix");
    group.throughput(Throughput::Elements(u64::from(WORKERS) * CHAINS * BLOCKS));
    group.sample_size(20);
    group.bench_function("store", |bencher| {
        bencher.iter_batched_ref(
            planted,
            |(_, _, trees)| fill(trees, &chains),
            BatchSize::PerIteration,
        );
    });
    group.bench_function("remove", |bencher| {
        let filled = || {
            let (forest, index, mut trees) = planted();
            fill(&mut trees, &chains);
            (forest, index, trees)
        };
        bencher.iter_batched_ref(
            filled,
            |(_, _, trees)| empty(trees, &chains),
            BatchSize::PerIteration,
        );
    });
    group.finish();

    fill(&mut trees, &chains);
    let mut group = criterion.benchmark_group("radix/lookup");
    for (name, blocks) in [("shared by all", SHARED), ("whole", BLOCKS)] {
        let prompts: Vec<Vec<Local>> = (0..WORKERS)
            .map(|worker| {
                let chain = chain(worker, 3);
                chain[..blocks as usize]
                    .iter()
                    .map(|block| block.local)
                    .collect()
            })
            .collect();
        let (mut found, mut next) = (Vec::new(), 0);
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                next = (next + 1) % prompts.len();
                found.clear();
                index.overlap(start(), black_box(&prompts[next]), &mut found);
                found.len()
            });
        });
    }
    group.finish();
    drop((trees, forest));
}

criterion_group!(benches, radix);
criterion_main!(benches);
