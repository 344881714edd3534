//! The index over reported blocks: storing, removing, looking up, at 100 workers of 1,000 blocks each
//! that share a system prompt. Prints the memory that a membership takes, as it is filled and after all
//! was removed and stored again.
//!
//! Budget: 200,000 blocks/s of events on one core next to requests, so 5 µs a block; a lookup of a
//! long prompt under 10 µs.
//!
//! Beside the peers' indexes on the same operations, the public synthetic trace once; 2 cores, shared,
//! 2026-11-21. Peers: kv-index 2.0.0 ChainIndex, dynamo-kv-router 1.6.1 RadixTree and
//! ConcurrentRadixTreeCompressed (CRTC). Medians of an operation over 5, 7 and 5 rounds, all indexes in
//! one run; 8 and 64 workers with caches of 20,000 blocks, 512 with 13,000. These modules built alone,
//! with thin link-time optimisation. The machine was busy: runs differ by a fifth, their ratios by less.
//!
//! | workers | index | stored ns/block | removed | lookup mean | p50 | p99 | CPU s | bytes/membership | beside a writer: apply, lookup |
//! |---|---|---|---|---|---|---|---|---|---|
//! | 8 | RadixTree | 40.5 | 39.3 | 533 | 84 | 5,683 | 0.163 | 111 | - |
//! | 8 | CRTC | 40.5 | 43.0 | 2,284 | 578 | 10,743 | 0.173 | 499 | 59.5, 3,183 |
//! | 8 | ChainIndex | 24.8 | 47.3 | 759 | 215 | 7,488 | 0.145 | 98 | 40.0, 780 |
//! | 8 | this | 24.4 | 20.9 | 753 | 248 | 7,112 | 0.093 | 40 | 25.9, 906 |
//! | 64 | RadixTree | 108.0 | 101.8 | 2,260 | 1,235 | 9,767 | 0.121 | 82 | - |
//! | 64 | CRTC | 108.1 | 100.0 | 2,778 | 1,612 | 11,951 | 0.137 | 90 | 129.2, 5,555 |
//! | 64 | ChainIndex | 55.6 | 83.3 | 2,240 | 1,118 | 9,484 | 0.074 | 59 | 73.8, 5,041 |
//! | 64 | this | 53.7 | 47.9 | 1,654 | 754 | 8,379 | 0.063 | 38 | 61.6, 3,028 |
//! | 512 | RadixTree | 105.8 | 59.2 | 2,084 | 1,264 | 9,198 | 0.139 | 73 | - |
//! | 512 | CRTC | 113.1 | 54.2 | 2,407 | 1,451 | 10,764 | 0.148 | 74 | 134.2, 4,448 |
//! | 512 | ChainIndex | 63.6 | 45.0 | 2,028 | 1,162 | 9,042 | 0.086 | 56 | 70.1, 3,976 |
//! | 512 | this | 51.9 | 44.0 | 1,416 | 747 | 6,030 | 0.071 | 31 | 63.7, 3,844 |
//!
//! RadixTree's lookup at 8 workers is faster than this one. At 64 and 512 workers the trace fills the
//! caches but once, so that growing is most of the work; there the CPU is 0.8 of ChainIndex's, and 0.64
//! where caches are full and blocks come and go.

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
