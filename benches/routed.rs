//! Routed prompts of other replicas: what a message costs to receive, and a choice costs to share.
//!
//! Budget: 100 ns for each routed hash, with 1,000,000 blocks predicted at 8 full workers, so that each new block evicts
//! one; 1 µs to queue a prompt with 16 new blocks.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use warmroute::ids::{Block, BlockHash, WorkerId};
use warmroute::kv::predicted::{self, PredictedIndex};
use warmroute::kv::unconfirmed::{self, UnconfirmedBlocks};
use warmroute::observe::metrics::Registry;
use warmroute::peers::routed::{RoutedPrompts, RoutedWorker};
use warmroute::peers::wire;

const WORKERS: u32 = 8;
/// Blocks at a worker: 125,000 of 16 tokens.
const CACHE_TOKENS: u64 = 2_000_000;
/// Prompts in a message.
const PROMPTS: u64 = 64;

fn worker(number: u32) -> Option<RoutedWorker> {
    Some(RoutedWorker {
        id: WorkerId(number),
        cache_tokens: CACHE_TOKENS,
    })
}

/// Hashes that no other call returns.
fn hashes(random: &mut fastrand::Rng, count: usize) -> Vec<u64> {
    (0..count).map(|_| random.u64(..)).collect()
}

fn prompt(number: u32, parent: Option<u64>, blocks: Vec<u64>) -> wire::RoutedPrompt {
    wire::RoutedPrompt {
        number,
        parent,
        tokens: vec![16; blocks.len()],
        blocks,
        retracted: 0,
    }
}

#[expect(clippy::disallowed_methods, reason = "a bench has no tokio clock")]
fn bench(criterion: &mut Criterion) {
    let now = Instant::now();
    let registry = Registry::default();
    let metrics = predicted::Metrics::new(&registry);
    let predicted = Arc::new(PredictedIndex::new(
        predicted::Settings::default(),
        metrics,
        now,
    ));
    let metrics = unconfirmed::Metrics::new(&registry);
    let unconfirmed = UnconfirmedBlocks::new(unconfirmed::Settings::default(), metrics, now);
    let routed = RoutedPrompts::new(1 << 20, predicted, unconfirmed, &registry);
    let mut random = fastrand::Rng::with_seed(1);
    // Fills the caches.
    for number in 0..8_000 {
        let blocks = hashes(&mut random, 160);
        let prompts = vec![prompt(number % WORKERS, None, blocks)];
        let message = wire::RoutedPrompts {
            prompts,
            unconfirmed: Vec::new(),
        };
        routed.apply(now, &message, worker);
    }
    let mut group = criterion.benchmark_group("routed");
    for blocks in [16, 128] {
        group.throughput(Throughput::Elements(PROMPTS * blocks));
        group.bench_function(format!("receive/{blocks}_new_blocks"), |bencher| {
            let message = || {
                let blocks = |_| hashes(&mut random, blocks as usize);
                let prompts = (0..PROMPTS).map(blocks);
                let prompts = prompts
                    .zip(0..)
                    .map(|(blocks, it)| prompt(it % WORKERS, None, blocks));
                wire::RoutedPrompts {
                    prompts: prompts.collect(),
                    unconfirmed: Vec::new(),
                }
            };
            bencher.iter_batched(
                message,
                |message| routed.apply(now, &message, worker),
                BatchSize::SmallInput,
            );
        });
    }
    // A turn of a conversation: 4 new blocks after 150 that are used again.
    group.throughput(Throughput::Elements(1));
    group.bench_function("receive/next_turn_of_150_blocks", |bencher| {
        let mut end = None;
        let message = || {
            let blocks = hashes(&mut random, if end.is_some() { 4 } else { 150 });
            let next = prompt(0, end, blocks);
            // The same path is continued from its 150th block on.
            if end.is_none() {
                end = next.blocks.last().copied();
            }
            wire::RoutedPrompts {
                prompts: vec![next],
                unconfirmed: Vec::new(),
            }
        };
        bencher.iter_batched(
            message,
            |message| routed.apply(now, &message, worker),
            BatchSize::PerIteration,
        );
    });
    group.throughput(Throughput::Elements(PROMPTS * 176));
    group.bench_function("receive/unconfirmed_176_prefixes", |bencher| {
        let message = || wire::RoutedPrompts {
            prompts: Vec::new(),
            unconfirmed: (0..PROMPTS as u32)
                .map(|number| wire::UnconfirmedPrompt {
                    number: number % WORKERS,
                    prefixes: hashes(&mut random, 176),
                })
                .collect(),
        };
        bencher.iter_batched(
            message,
            |message| routed.apply(now, &message, worker),
            BatchSize::SmallInput,
        );
    });
    routed.set_heard(true);
    let blocks: Vec<Block> = (1..=150)
        .map(|number| Block {
            path: BlockHash(number),
            end_tokens: number as u32 * 16,
        })
        .collect();
    group.throughput(Throughput::Elements(1));
    group.bench_function("send/16_new_blocks", |bencher| {
        let mut queued = 0;
        bencher.iter(|| {
            routed.push(now, WorkerId(1), black_box(&blocks), 134..150);
            queued += 1;
            if queued % 256 == 0 {
                black_box(routed.take_message(|worker| Some(worker.0)));
            }
        });
    });
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
