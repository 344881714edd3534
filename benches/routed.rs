//! Routed prompts of other replicas: what a message costs to receive, and a choice costs to share.
//!
//! Budget: 100 ns for each routed hash, with 1,000,000 blocks predicted at 8 full workers, so that each new block evicts
//! one; 1 µs to queue a prompt with 16 new blocks. The same with 16,000 blocks shows how much of it is waiting for
//! memory.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use warmroute::ids::{Block, BlockHash, WorkerId};
use warmroute::kv::predicted::{self, PredictedIndex};
use warmroute::kv::unconfirmed::{self, UnconfirmedBlocks};
use warmroute::observe::metrics::Registry;
use warmroute::peers::routed::{RoutedPrompts, RoutedWorker};
use warmroute::peers::wire;

const WORKERS: u32 = 8;
/// Blocks of 16 tokens at a worker.
const BLOCKS: u64 = 125_000;
/// So few that they lie in a core's caches.
const FEW_BLOCKS: u64 = 2_000;
/// Prompts in a message.
const PROMPTS: u64 = 64;

/// Each worker has so many blocks.
fn worker(blocks: u64) -> impl Fn(u32) -> Option<RoutedWorker> + Copy {
    move |number| {
        Some(RoutedWorker {
            id: WorkerId(number),
            cache_tokens: blocks * 16,
        })
    }
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

/// An index in which each worker has as many blocks as fit.
fn full(
    random: &mut fastrand::Rng,
    now: Instant,
    blocks: u64,
) -> (RoutedPrompts, Arc<UnconfirmedBlocks>) {
    let registry = Registry::default();
    let metrics = predicted::Metrics::new(&registry);
    let predicted = PredictedIndex::new(predicted::Settings::default(), metrics, now);
    let metrics = unconfirmed::Metrics::new(&registry);
    let unconfirmed = UnconfirmedBlocks::new(unconfirmed::Settings::default(), metrics);
    let routed = RoutedPrompts::new(1 << 20, Arc::new(predicted), unconfirmed.clone(), &registry);
    for number in 0..blocks as u32 / 20 {
        let prompts = vec![prompt(number % WORKERS, None, hashes(random, 160))];
        let message = wire::RoutedPrompts {
            prompts,
            unconfirmed: Vec::new(),
        };
        routed.apply(now, &message, worker(blocks));
    }
    (routed, unconfirmed)
}

#[expect(clippy::disallowed_methods, reason = "a bench has no tokio clock")]
fn bench(criterion: &mut Criterion) {
    let now = Instant::now();
    let mut random = fastrand::Rng::with_seed(1);
    let mut group = criterion.benchmark_group("routed");
    for (name, new_blocks, blocks) in [
        ("receive/16_new_blocks", 16, BLOCKS),
        ("receive/128_new_blocks", 128, BLOCKS),
        ("receive/16_new_blocks_of_few", 16, FEW_BLOCKS),
    ] {
        let (routed, _) = full(&mut random, now, blocks);
        group.throughput(Throughput::Elements(PROMPTS * new_blocks));
        group.bench_function(name, |bencher| {
            let message = || {
                let prompts = (0..PROMPTS as u32).map(|number| {
                    let blocks = hashes(&mut random, new_blocks as usize);
                    prompt(number % WORKERS, None, blocks)
                });
                wire::RoutedPrompts {
                    prompts: prompts.collect(),
                    unconfirmed: Vec::new(),
                }
            };
            bencher.iter_batched(
                message,
                |message| routed.apply(now, &message, worker(blocks)),
                BatchSize::SmallInput,
            );
        });
    }
    let (routed, unconfirmed) = full(&mut random, now, BLOCKS);
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
            |message| routed.apply(now, &message, worker(BLOCKS)),
            BatchSize::PerIteration,
        );
    });
    group.throughput(Throughput::Elements(PROMPTS * 176));
    // Not so many that some are refused.
    let mut received = 0;
    group.bench_function("receive/unconfirmed_176_prefixes", |bencher| {
        let message = || {
            received += 1;
            if received % 50 == 0 {
                unconfirmed.remove_ended(now + Duration::from_secs(3_600), |_| None);
            }
            wire::RoutedPrompts {
                prompts: Vec::new(),
                unconfirmed: (0..PROMPTS as u32)
                    .map(|number| wire::UnconfirmedPrompt {
                        number: number % WORKERS,
                        prefixes: hashes(&mut random, 176),
                    })
                    .collect(),
            }
        };
        bencher.iter_batched(
            message,
            |message| routed.apply(now, &message, worker(BLOCKS)),
            BatchSize::PerIteration,
        );
    });
    routed.set_connected(true);
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
