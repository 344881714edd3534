//! The prefix index: storing, removing and looking up blocks of 100 workers with 1,000 blocks each that
//! share a system prompt. Prints the memory of a membership (a block that a worker owns) when the index
//! is first filled, and after everything was removed and stored again.
//!
//! Budget: 200,000 blocks/s of events on one core beside requests, so 5 µs a block; the lookup of a long
//! prompt under 10 µs.
//!
//! Beside the lock-free index that was here before, both in turns in one process (2026-11-29, two cores that were busy,
//! thread CPU time, medians of 3 to 11 rounds; memory by a counting allocator). Each worker has 20,000 blocks in prompts of
//! 69 blocks: either new ones, or with the first 40 from one of eight system prompts. Chunks are of 32 blocks; times in ns
//! a block, and a lookup of 69 blocks:
//!
//! | workers | prompts | index | stored | removed | stored alone | removed alone | lookup | bytes a distinct block |
//! |---|---|---|---|---|---|---|---|---|
//! | 4 | new | before | 29.6 | 17.0 | 105 | 35 | 157 | 48.3 |
//! | 4 | new | this | 52.9 | 28.5 | 75 | 106 | 249 | 35.9 |
//! | 4 | shared | before | 32.5 | 25.7 | 103 | 57 | 262 | 73.9 |
//! | 4 | shared | this | 57.8 | 43.7 | 89 | 104 | 372 | 50.0 |
//! | 8 | new | before | 39.8 | 20.4 | 122 | 37 | 159 | 46.3 |
//! | 8 | new | this | 72.7 | 42.1 | 123 | 153 | 389 | 35.9 |
//! | 8 | shared | before | 37.4 | 26.2 | 101 | 60 | 327 | 64.3 |
//! | 8 | shared | this | 70.5 | 52.2 | 99 | 111 | 518 | 50.1 |
//! | 64 | new | before | 70.8 | 35.1 | | | 361 | 43.2 |
//! | 64 | new | this | 111.1 | 62.1 | | | 752 | 35.9 |
//! | 64 | shared | before | 71.8 | 44.7 | | | 669 | 60.3 |
//! | 64 | shared | this | 119.2 | 96.7 | | | 1,573 | 50.2 |
//!
//! Where the time goes: each new block needs two cache lines of the table of names that are far from all others, and most
//! of the time is spent waiting for them. Looking for all names of a piece before the first is changed overlaps the waits.

use std::hint::black_box;
use std::num::NonZeroU32;
use std::sync::Arc;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use warmroute::ids::WorkerId;
use warmroute::kv::block::{ChainRoot, LocalHash, chain_root};
use warmroute::kv::event::{EngineHash, Tier};
use warmroute::kv::index::{CopyReport, NewBlock, Parent, PrefixIndex, Tree};
use warmroute::kv::indexes::{PrefixIndexes, Settings};
use warmroute::observe::metrics::Registry;

const WORKERS: u32 = 100;
const CHAINS: u64 = 10;
const BLOCKS: u64 = 100;
/// Blocks of each chain that all workers share.
const SHARED: u64 = 20;

fn start() -> ChainRoot {
    chain_root(None, None)
}

/// One worker's conversation.
fn chain(worker: u32, number: u64) -> Vec<NewBlock> {
    let mut random = fastrand::Rng::with_seed(1);
    let new = |at| {
        if at == SHARED {
            random = fastrand::Rng::with_seed(u64::from(worker) << 32 | number);
        }
        NewBlock {
            name: EngineHash(random.u64(..)),
            local: LocalHash(random.u64(..)),
        }
    };
    (0..BLOCKS).map(new).collect()
}

fn fill(trees: &mut [Tree], chains: &[Vec<Vec<NewBlock>>]) {
    for (tree, chains) in trees.iter_mut().zip(chains) {
        for chain in chains {
            tree.store(Parent::Root(start()), chain, Tier::Gpu, CopyReport::OneMore)
                .expect("it begins at the root");
        }
    }
}

fn empty(trees: &mut [Tree], chains: &[Vec<Vec<NewBlock>>]) {
    for (tree, chains) in trees.iter_mut().zip(chains) {
        for chain in chains {
            let names: Vec<EngineHash> = chain.iter().rev().map(|block| block.name).collect();
            tree.remove(&names, Tier::Gpu);
        }
    }
}

/// As vLLM reports evictions of single blocks: a call for each block.
fn empty_one_by_one(trees: &mut [Tree], chains: &[Vec<Vec<NewBlock>>]) {
    for (tree, chains) in trees.iter_mut().zip(chains) {
        for block in chains.iter().flat_map(|chain| chain.iter().rev()) {
            tree.remove(&[block.name], Tier::Gpu);
        }
    }
}

fn with_trees() -> (Arc<PrefixIndexes>, Arc<PrefixIndex>, Vec<Tree>) {
    let indexes = PrefixIndexes::new(Settings::default(), &Registry::default());
    let index = indexes.index(&"m".into(), NonZeroU32::MIN);
    let add_tree = |worker| {
        let mut tree = index.add_tree(WorkerId(worker), 0);
        tree.set_visible(true);
        tree
    };
    let trees = (0..WORKERS).map(add_tree).collect();
    (indexes, index, trees)
}

#[expect(clippy::print_stdout, reason = "a bench prints what it measured")]
fn index(criterion: &mut Criterion) {
    let chains: Vec<Vec<Vec<NewBlock>>> = (0..WORKERS)
        .map(|worker| (0..CHAINS).map(|number| chain(worker, number)).collect())
        .collect();
    let (indexes, index, mut trees) = with_trees();
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

    let mut group = criterion.benchmark_group("index");
    group.throughput(Throughput::Elements(u64::from(WORKERS) * CHAINS * BLOCKS));
    group.sample_size(20);
    group.bench_function("store", |bencher| {
        bencher.iter_batched_ref(
            with_trees,
            |(_, _, trees)| fill(trees, &chains),
            BatchSize::PerIteration,
        );
    });
    let filled = || {
        let (indexes, index, mut trees) = with_trees();
        fill(&mut trees, &chains);
        (indexes, index, trees)
    };
    group.bench_function("remove", |bencher| {
        bencher.iter_batched_ref(
            filled,
            |(_, _, trees)| empty(trees, &chains),
            BatchSize::PerIteration,
        );
    });
    group.bench_function("remove, a call for each block", |bencher| {
        bencher.iter_batched_ref(
            filled,
            |(_, _, trees)| empty_one_by_one(trees, &chains),
            BatchSize::PerIteration,
        );
    });
    group.finish();

    fill(&mut trees, &chains);
    let mut group = criterion.benchmark_group("index/lookup");
    for (name, blocks) in [("shared by all", SHARED), ("whole", BLOCKS)] {
        let prompts: Vec<Vec<LocalHash>> = (0..WORKERS)
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
    drop((trees, indexes));
}

criterion_group!(benches, index);
criterion_main!(benches);
