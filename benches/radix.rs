//! The index over reported blocks: storing, removing, looking up, at 100 workers of 1,000 blocks each
//! that share a system prompt. Prints the memory that a membership takes, as it is filled and after all
//! was removed and stored again.
//!
//! Budget: 200,000 blocks/s of events on one core next to requests, so 5 µs a block; a lookup of a
//! long prompt under 10 µs.
//!
//! Beside the peers' indexes on the same operations, the public synthetic trace once; 2 cores,
//! 2026-11-21. Peers: kv-index 2.0.0 ChainIndex, dynamo-kv-router 1.6.1 RadixTree. Medians of an operation
//! over 9 rounds, the least CPU of a round, and of lookups beside a writer the half and the slowest
//! hundredth; all indexes in one run; 8 and 64 workers with caches of 20,000 blocks, 512 with 13,000. These
//! modules built alone, with thin link-time optimisation. "Before" is this index as it was before its pages had hints.
//! The machine was overloaded, with 25 to 50 processes waiting: times are half again too long, and
//! ratios good to a tenth.
//!
//! | workers | index | stored ns/block | removed | lookup mean | p50 | p99 | CPU s | bytes/membership | beside a writer: apply, p50, p99 |
//! |---|---|---|---|---|---|---|---|---|---|
//! | 8 | RadixTree | 90.4 | 88.8 | 1,028 | 190 | 5,929 | 0.277 | 109 | - |
//! | 8 | ChainIndex | 27.9 | 53.3 | 723 | 250 | 3,816 | 0.160 | 98 | 49.2, 170, 2,844 |
//! | 8 | before | 27.8 | 24.7 | 1,813 | 250 | 17,927 | 0.101 | 40 | 37.2, 210, 6,560 |
//! | 8 | this | 28.5 | 26.7 | 913 | 250 | 5,879 | 0.103 | 41 | 34.6, 210, 3,746 |
//! | 64 | RadixTree | 458.8 | 163.1 | 2,191 | 2,043 | 7,161 | 0.219 | 82 | - |
//! | 64 | ChainIndex | 124.2 | 94.1 | 1,482 | 1,162 | 4,557 | 0.079 | 59 | 116.4, 511, 4,226 |
//! | 64 | before | 118.8 | 62.9 | 2,284 | 1,182 | 12,358 | 0.085 | 38 | 106.8, 531, 7,461 |
//! | 64 | this | 93.2 | 49.7 | 1,766 | 1,192 | 6,590 | 0.068 | 39 | 85.4, 721, 4,827 |
//! | 512 | RadixTree | 412.5 | 77.3 | 1,948 | 1,773 | 6,169 | 0.243 | 73 | - |
//! | 512 | ChainIndex | 71.6 | 43.6 | 1,400 | 1,052 | 6,009 | 0.088 | 56 | 172.4, 731, 4,847 |
//! | 512 | before | 104.4 | 46.4 | 1,735 | 1,062 | 6,930 | 0.089 | 31 | 103.1, 741, 6,570 |
//! | 512 | this | 98.7 | 35.1 | 1,472 | 1,022 | 5,288 | 0.077 | 32 | 103.4, 761, 5,118 |
//!
//! Where the time goes: at 64 and 512 workers the trace fills the caches but once, so that growing is most
//! of the work. Each block has its place in the table of names, a line far from all others; what is
//! left is mostly the translation of its address. The CPU there is 0.87 of ChainIndex's (0.78 to 0.86
//! in runs while fewer processes waited), and 0.65 where caches are full and blocks come and go.

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
