//! KV events of a very large fleet: what a followed rank takes in memory, and how fast batches are applied.
//!
//! 4,000 workers of six ranks each, as many as one index takes, followed by one thread as in the router, without sockets and
//! without decoding. Every rank caches the same system prompt of 8 blocks and then a conversation of its own, 8 blocks a
//! batch, and at last evicts one batch of it. Numbers are printed; CPU time is that of the whole process, which does nothing
//! else: `cargo bench --bench ranks`. Environment: WORKERS (4000), RANKS (6; more than an index takes have no tree, and count
//! in the memory all the same), BATCHES of a conversation (4).

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a bench prints, fails where it cannot go on, and follows ranks until it ends"
)]

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::sync::watch;
use warmroute::ids::{Model, WorkerId};
use warmroute::kv::event::{Batch, EngineHash, Event, Location, Stored};
use warmroute::kv::indexes::{self, PrefixIndexes};
use warmroute::kv::source::{Source, SourceBatch, SourceEvent};
use warmroute::kv::stream;
use warmroute::kv::subscriber::joins::{self, Joins};
use warmroute::kv::subscriber::{self, Metrics, Shared, StatusBoard, Subject};
use warmroute::observe::metrics::Registry;

const BLOCK_TOKENS: u32 = 16;
const BLOCKS_PER_BATCH: u32 = 8;

/// A rank's events, made when they are asked for: batch `n` once `turn` is above `n`.
struct Engine {
    rank: u64,
    conversation: u64,
    is_connected: bool,
    sent: u64,
    turn: watch::Receiver<u64>,
    applied: Arc<AtomicU64>,
}

impl Engine {
    fn batch(&self) -> SourceBatch {
        let mut batch = Batch::default();
        let of = |turn: u64| -> Vec<EngineHash> {
            // The system prompt has the same blocks everywhere.
            let rank = if turn == 0 { 0 } else { self.rank + 1 };
            let first = (rank << 24) + turn * u64::from(BLOCKS_PER_BATCH);
            let hashes = first..first + u64::from(BLOCKS_PER_BATCH);
            hashes
                .map(|hash| EngineHash(hash.wrapping_mul(0x9E37_79B9_7F4A_7C15)))
                .collect()
        };
        if self.sent > self.conversation {
            // As vLLM sends it: one event a block.
            for hash in of(self.conversation) {
                batch.remove(&[hash], Location::default());
            }
        } else {
            let hashes = of(self.sent);
            let salt = if self.sent == 0 {
                0
            } else {
                self.rank as u32 + 1
            };
            let tokens = 0..BLOCKS_PER_BATCH * BLOCK_TOKENS;
            batch.events.push(Event::Stored(Stored {
                parent: (self.sent > 0).then(|| of(self.sent - 1)[BLOCKS_PER_BATCH as usize - 1]),
                token_ids: tokens
                    .map(|token| token.wrapping_mul(31).wrapping_add(salt))
                    .collect(),
                hashes,
                block_size: BLOCK_TOKENS,
                ..Stored::default()
            }));
        }
        SourceBatch {
            sequence: self.sent,
            digest: u128::from(self.sent),
            bytes: 600,
            batch: Ok(batch),
            snapshot: None,
        }
    }
}

impl Source for Engine {
    async fn next(&mut self) -> SourceEvent {
        if !std::mem::replace(&mut self.is_connected, true) {
            return SourceEvent::Connected { incarnation: None };
        }
        let sent = self.sent;
        if self.turn.wait_for(|turn| *turn > sent).await.is_err() {
            return std::future::pending().await;
        }
        let batch = self.batch();
        self.sent += 1;
        self.applied.fetch_add(1, Relaxed);
        SourceEvent::Live(batch)
    }

    fn replay(&mut self, _first: u64) {}

    fn can_replay(&self) -> bool {
        false
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The resident memory of this process.
fn resident_bytes() -> f64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: f64 = text.split(' ').nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size() as f64
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let (workers, ranks) = (number("WORKERS", 4_000), number("RANKS", 6));
    let conversation = number("BATCHES", 4);
    let registry = Registry::default();
    let settings = indexes::Settings {
        max_index_memory: 64 << 30,
    };
    let indexes = PrefixIndexes::new(settings, &registry);
    let shared = Shared {
        indexes: indexes.clone(),
        board: Arc::new(StatusBoard::default()),
        metrics: Metrics::new(&registry),
        settings: stream::Settings::default(),
        on_cache_lost: Arc::new(|_| {}),
        joins: Joins::new(&joins::Settings::default(), &registry),
        trees: None,
    };
    let (turns, turn) = watch::channel(0);
    let (_restarts, restarts) = watch::channel(0);
    let applied = Arc::new(AtomicU64::new(0));
    let all = workers * ranks;
    println!("{workers} workers of {ranks} ranks: {all} ranks in one process");

    let model = Model::from("model");
    let (memory, cpu) = (resident_bytes(), cpu_time());
    for worker in 0..workers {
        let name: Arc<str> = format!("10.0.{}.{}:8000", worker / 250, worker % 250).into();
        for rank in 0..ranks {
            let subject = Subject {
                worker: WorkerId(worker as u32),
                name: name.clone(),
                address: name.clone(),
                rank: rank as u32,
                model: model.clone(),
                caches_pages: false,
                is_only_rank: ranks == 1,
            };
            let engine = Engine {
                rank: worker * ranks + rank,
                conversation,
                is_connected: false,
                sent: 0,
                turn: turn.clone(),
                applied: applied.clone(),
            };
            let following = subscriber::run(engine, subject, shared.clone(), restarts.clone());
            drop(tokio::spawn(following));
        }
    }
    // Each comes to wait for its first batch.
    while turns.receiver_count() as u64 <= all {
        tokio::task::yield_now().await;
    }
    for _ in 0..4 {
        tokio::task::yield_now().await;
    }
    let took = cpu_time().saturating_sub(cpu).as_secs_f64();
    println!(
        "following   {:6.2} us CPU and {:6.0} bytes a rank, before its first event",
        took * 1e6 / all as f64,
        (resident_bytes() - memory) / all as f64,
    );

    for round in 0..=conversation + 1 {
        let what = match round {
            0 => "shared".to_owned(),
            _ if round > conversation => "evicted".to_owned(),
            _ => format!("own {round}"),
        };
        let (memory, cpu) = (resident_bytes(), cpu_time());
        turns.send(round + 1).unwrap();
        while applied.load(Relaxed) < (round + 1) * all {
            tokio::task::yield_now().await;
        }
        tokio::task::yield_now().await;
        let took = cpu_time().saturating_sub(cpu).as_secs_f64();
        let blocks: u64 = indexes.all().iter().map(|(_, index)| index.len()).sum();
        println!(
            "{what:11} {:6.2} us CPU a batch of {BLOCKS_PER_BATCH} blocks, {:7.0} batches/s of one core, {:6.0} bytes more a rank; {blocks} blocks in the index",
            took * 1e6 / all as f64,
            all as f64 / took,
            (resident_bytes() - memory) / all as f64,
        );
    }
    println!("resident {:.1} GB", resident_bytes() / 1e9);
}
