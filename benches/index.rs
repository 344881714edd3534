//! The prefix index: storing, removing and looking up blocks of 100 workers with 1,000 blocks each that
//! share a system prompt. Prints the memory of a membership (a block that a worker owns) when the index
//! is first filled, and after everything was removed and stored again.
//!
//! Budget: 200,000 blocks/s of events on one core beside requests, so 5 µs a block; the lookup of a long
//! prompt under 10 µs.
//!
//! Compared with published indexes on the same operations of Mooncake's public synthetic trace, played
//! once; 2 cores, 2026-11-22. The others are ChainIndex of kv-index 2.0.0 and RadixTree of
//! dynamo-kv-router 1.6.1 (which loses the ends of chains). The numbers are medians of an operation and
//! of CPU over 21 rounds, and over 15 rounds beside a writer. All indexes ran in one process on an idle
//! machine; its memory is shared with other machines, so between runs all rows rise and fall together
//! by a third. 8 and 64 workers have caches of 20,000 blocks, 512 have 13,000. The index's modules were
//! built alone, with thin LTO. Times in ns.
//!
//! | workers | index | stored ns/block | removed ns/block | lookup mean | p50 | p99 | CPU s | bytes/membership | beside a writer: apply, lookup mean, p99 |
//! |---|---|---|---|---|---|---|---|---|---|
//! | 8 | RadixTree | 41.9 | 57.1 | 657 | 100 | 4,427 | 0.1995 | 109 | - |
//! | 8 | ChainIndex | 21.5 | 41.5 | 670 | 230 | 3,796 | 0.1299 | 98 | 37.3, 369, 3,395 |
//! | 8 | this | 21.6 | 17.8 | 653 | 250 | 3,686 | 0.0832 | 41 | 24.3, 381, 3,095 |
//! | 64 | RadixTree | 87.6 | 119.3 | 1,759 | 1,332 | 6,179 | 0.1146 | 82 | - |
//! | 64 | ChainIndex | 48.2 | 79.9 | 1,442 | 901 | 4,927 | 0.0677 | 59 | 74.4, 1,247, 4,997 |
//! | 64 | this | 44.6 | 34.8 | 1,252 | 671 | 4,647 | 0.0498 | 39 | 47.4, 1,095, 4,367 |
//! | 512 | RadixTree | 85.8 | 62.7 | 1,515 | 1,172 | 5,148 | 0.1159 | 73 | - |
//! | 512 | ChainIndex | 51.5 | 37.0 | 1,276 | 841 | 5,158 | 0.0673 | 56 | 58.6, 1,272, 5,148 |
//! | 512 | this | 38.5 | 26.7 | 1,088 | 631 | 3,856 | 0.0511 | 32 | 49.8, 1,074, 3,966 |
//!
//! The table was made before names left the name table late, before the short path for one removed block,
//! before aliases were looked up for each block, and before a new name was looked for and entered in one
//! step and full buckets' second lines were asked for ahead. With these, 2026-11-25, another, faster
//! machine, quiet: medians of 5 to 7 runs of 3 rounds each (3 runs at 512), both indexes in turns in one
//! process, whole crates with thin LTO, mimalloc; the last column is the CPU of the whole stream beside
//! ChainIndex's in the same runs:
//!
//! | workers | index | stored ns/block | removed ns/block | lookup mean | CPU s | of ChainIndex's |
//! |---|---|---|---|---|---|---|
//! | 8 | ChainIndex | 18.3 | 36.5 | 532 | 0.1123 | |
//! | 8 | this | 18.9 | 13.9 | 413 | 0.0685 | 0.61 (0.60 to 0.62; 0.64 before the last two changes) |
//! | 64 | ChainIndex | 35.0 | 59.1 | 992 | 0.0468 | |
//! | 64 | this | 29.8 | 19.2 | 731 | 0.0328 | 0.69 (0.62 to 0.76; 0.73 before; 0.72 and 0.79 in two other series) |
//! | 512 | ChainIndex | 45.5 | 32.6 | 1,005 | 0.0624 | |
//! | 512 | this | 29.3 | 20.9 | 712 | 0.0388 | 0.62 (0.61 to 0.65; 0.72 before) |
//! | 64, a removal for each block | ChainIndex | 36.5 | 201.6 | 1,010 | 0.0967 | |
//! | 64, a removal for each block | this | 29.7 | 64.3 | 763 | 0.0530 | 0.55 (0.52 to 0.57; 0.61 before) |
//! | 64, a seed for each engine | ChainIndex | 34.3 | 58.3 | 1,003 | 0.0473 | |
//! | 64, a seed for each engine | this | 41.3 | 22.2 | 779 | 0.0414 | 0.88 (0.82 to 0.95; 0.92 before) |
//!
//! Beside a writer (9 rounds each) applying takes 0.65, 0.63 and 0.69 of ChainIndex's CPU with 8, 64 and
//! 512 workers, and a lookup 1.36, 1.01 and 1.14 times its time: 234, 671 and 661 ns at the mean.
//!
//! Earlier changes, measured on 2026-11-24 beside the index as it was, while other programs were being
//! built, so that all times are about twice as long: 64 workers, medians of an operation over 5 rounds, in
//! ns a block; instructions are an emulated processor's (callgrind).
//!
//! | | before | then |
//! |---|---|---|
//! | removed, a call for each block (3,993 requests) | 342 | 132 |
//! | stored, a seed for each engine (2,500 requests) | 96.9 | 74.9 |
//! | instructions of a removed block, a call for each | 1,264 | 489 |
//! | instructions of a removed block, 33 to a call | 233 | 193 |
//!
//! With 2 % of evictions in the middle of a chain (8 workers), and with engines that name blocks by
//! seeds of their own (64 workers), each of 3,993 lookups was compared with the true caches: none was
//! wrong.
//!
//! Where the time goes: with 64 and 512 workers the trace fills the caches only once, so most of the work
//! is growing. Each new block needs a cache line of the name table that is far from all others; most of
//! the time is spent waiting for it. In 2,500 requests with 64 workers, before the last two changes, a stored block
//! takes 347 instructions and 2.8 lines that a second-level cache of 512 KiB does not have, and 227 and
//! 4.7 in ChainIndex; 1.1 of the 2.8 are lines of the name table, 0.6 memory that is cleared when it is
//! first taken, 0.4 buckets of names that split. For every 16 blocks a long lookup
//! compares one page's head and sums the prompt's hashes: 11 ns if most of both is in the second-level
//! cache.

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
