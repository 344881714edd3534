//! The index over reported blocks: storing, removing, looking up, at 100 workers of 1,000 blocks each
//! that share a system prompt. Prints the memory that a membership takes, as it is filled and after all
//! was removed and stored again.
//!
//! Budget: 200,000 blocks/s of events on one core next to requests, so 5 µs a block; a lookup of a
//! long prompt under 10 µs.
//!
//! Beside the peers' indexes on the same operations, the public synthetic trace once; 2 cores,
//! 2026-11-21. Peers: kv-index 2.0.0 ChainIndex, dynamo-kv-router 1.6.1 RadixTree (which loses tails). Medians
//! of an operation and of CPU over 21 rounds, all indexes in one run on a machine with nothing else to do; RadixTree
//! and "before" from a run of 5 rounds a minute earlier. 8 and 64 workers with caches of 20,000 blocks, 512 with 13,000.
//! These modules built alone, with thin link-time optimisation. "Before" is this index as it was before its pages
//! had hints.
//!
//! | workers | index | stored ns/block | removed | lookup mean | p50 | p99 | CPU s | bytes/membership | beside a writer: apply, lookup mean, p99 |
//! |---|---|---|---|---|---|---|---|---|---|
//! | 8 | RadixTree | 31.5 | 41.2 | 485 | 80 | 3,385 | 0.1517 | 109 | - |
//! | 8 | ChainIndex | 19.2 | 39.1 | 512 | 200 | 2,814 | 0.1190 | 98 | 32.5, 158, 1,202 |
//! | 8 | before | 19.7 | 14.8 | 822 | 240 | 6,249 | 0.0732 | 40 | 19.7, 367, 3,495 |
//! | 8 | this | 19.6 | 15.1 | 599 | 220 | 3,675 | 0.0731 | 41 | 20.0, 256, 2,153 |
//! | 64 | RadixTree | 61.4 | 83.8 | 1,206 | 731 | 4,407 | 0.0778 | 82 | - |
//! | 64 | ChainIndex | 33.9 | 57.6 | 941 | 491 | 3,395 | 0.0460 | 59 | 69.9, 482, 2,213 |
//! | 64 | before | 36.2 | 31.9 | 1,164 | 511 | 5,268 | 0.0402 | 38 | 43.9, 696, 3,115 |
//! | 64 | this | 30.1 | 24.0 | 1,032 | 471 | 4,006 | 0.0347 | 39 | 35.4, 660, 3,075 |
//! | 512 | RadixTree | 79.7 | 56.6 | 1,311 | 901 | 4,677 | 0.1059 | 73 | - |
//! | 512 | ChainIndex | 39.6 | 32.5 | 904 | 521 | 3,585 | 0.0514 | 56 | 51.1, 476, 2,103 |
//! | 512 | before | 39.6 | 31.8 | 1,073 | 551 | 4,397 | 0.0529 | 31 | 67.7, 911, 3,766 |
//! | 512 | this | 28.7 | 19.3 | 982 | 491 | 3,746 | 0.0390 | 32 | 39.0, 638, 2,604 |
//!
//! Where the time goes: at 64 and 512 workers the trace fills the caches but once, so that growing is most
//! of the work. Each block has its place in the table of names, a line far from all others; what is
//! left is mostly the translation of its address. The CPU there is 0.75 and 0.76 of ChainIndex's, and 0.61
//! where caches are full and blocks come and go. A lookup costs 1.09 to 1.17 times a lookup there.

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
