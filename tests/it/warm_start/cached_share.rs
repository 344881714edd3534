//! What a late replica's first requests find cached, beside those of a warm one and of one that has no replica to ask.
//!
//! Three runs of the same conversations over engines whose history of events is gone: the first part always through a
//! router that was there from the start; then the next requests through that router, through a late one that took its
//! trees over, or through a late one that is alone. The engines count what they found cached.
//!
//! `cargo test --test it -- --ignored --nocapture the_cached_share_at_full_size` takes some minutes;
//! `WARMROUTE_SHARE_ENGINES` and `WARMROUTE_SHARE_BLOCKS` give other sizes.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use serde_json::json;
use warmroute::sim::worker::Settings;

use super::{forgetful, is_ready, rank, replica};
use crate::client;
use crate::cluster::{Cluster, Engine, Router, eventually};

#[derive(Clone, Copy, Debug)]
enum Through {
    Warm,
    Late,
    Alone,
}

#[derive(Clone, Copy, Debug)]
struct Size {
    engines: usize,
    /// The blocks of each engine's cache.
    blocks: usize,
    /// Through the router under test.
    requests: usize,
}

/// Each conversation grows by this many blocks, up to a length, and begins anew.
const TURN: u32 = 2;
const LONGEST: u32 = 24;
const BLOCK: u32 = 16;
/// Of their length, conversations share a system prompt of this many blocks by eights.
const SYSTEM: u32 = 4;
/// Requests at a time.
const CLIENTS: usize = 8;

/// Conversations in random order: the same for the same seed.
struct Conversations {
    random: fastrand::Rng,
    /// How long each is, in blocks, and how often it began anew.
    lengths: Vec<(u32, u32)>,
}

impl Conversations {
    fn new(size: Size) -> Self {
        // As many as the caches have room for at their mean length.
        let count = size.engines * size.blocks / (LONGEST as usize / 2 + TURN as usize);
        Self {
            random: fastrand::Rng::with_seed(3),
            lengths: vec![(0, 0); count],
        }
    }

    fn next(&mut self) -> (String, u64) {
        let index = self.random.usize(..self.lengths.len());
        let (length, began) = &mut self.lengths[index];
        *length += TURN;
        if *length > LONGEST {
            (*length, *began) = (TURN, *began + 1);
        }
        let (length, began) = (*length, *began);
        let own = 1_000_000 + (index as u32 * 64 + began % 64) * 1_000;
        let token = |at: u32| {
            if at / BLOCK < SYSTEM {
                (index as u32 / 8) * 100 + at
            } else {
                own + at
            }
        };
        let tokens: Vec<u32> = (0..(SYSTEM + length) * BLOCK + 1).map(token).collect();
        let body = json!({"model": "sim", "prompt": tokens, "max_tokens": 1}).to_string();
        (body, tokens.len() as u64)
    }
}

/// Plays requests at a router. Returns the share of prompt tokens that the engines found cached.
async fn play(
    router: &Router,
    engines: &[Engine],
    conversations: &mut Conversations,
    requests: usize,
) -> f64 {
    let found = || engines.iter().map(Engine::cached_tokens).sum::<u64>();
    let before = found();
    let mut tokens = 0;
    let mut left = requests;
    while left > 0 {
        let count = left.min(CLIENTS);
        let mut sent = tokio::task::JoinSet::new();
        for _ in 0..count {
            let (body, prompt_tokens) = conversations.next();
            tokens += prompt_tokens;
            let api = router.api;
            sent.spawn(async move { client::post(api, "/v1/completions", body).await.status });
        }
        for status in sent.join_all().await {
            assert_eq!(status, 200);
        }
        left -= count;
    }
    (found() - before) as f64 / tokens as f64
}

/// The share of the requests under test, and how long the late router took until it was ready.
async fn share(size: Size, through: Through) -> (f64, Duration) {
    let settings = Settings {
        cache_blocks: NonZeroU32::new(size.blocks as u32).unwrap(),
        ..forgetful()
    };
    let engines = Cluster::engines_here(vec![settings; size.engines]).await;
    let first = Router::here(&replica(&engines, &[])).await;
    is_ready(&first).await;
    for engine in &engines {
        eventually("it is followed", async || {
            rank(&first, &engine.name).await["connected"] == true
        })
        .await;
    }
    let mut conversations = Conversations::new(size);
    let warming = conversations.lengths.len() * (LONGEST / TURN) as usize * 2 / 3;
    play(&first, &engines, &mut conversations, warming).await;
    let began = Instant::now();
    let late = match through {
        Through::Warm => None,
        Through::Late => Some(Router::here(&replica(&engines, &[&first])).await),
        Through::Alone => Some(Router::here(&replica(&engines, &[])).await),
    };
    let router = late.as_ref().unwrap_or(&first);
    is_ready(router).await;
    let took = began.elapsed();
    let share = play(router, &engines, &mut conversations, size.requests).await;
    (share, took)
}

#[expect(clippy::print_stdout, reason = "the shares that it measures")]
async fn compare(size: Size) -> [f64; 3] {
    let mut shares = [0.0; 3];
    let cases = [Through::Warm, Through::Late, Through::Alone];
    for (through, of) in cases.into_iter().zip(&mut shares) {
        let (share, took) = share(size, through).await;
        *of = share;
        println!(
            "{size:?} {through:?}: {:.1} % cached, ready after {took:?}",
            share * 100.0
        );
    }
    shares
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_replicas_first_requests_find_as_much_cached_as_those_of_a_warm_one() {
    let [warm, late, alone] = compare(Size {
        engines: 6,
        blocks: 160,
        requests: 300,
    })
    .await;
    // Of so few requests; the bar for a thousand is three points.
    assert!(late > warm - 0.1, "{warm} {late}");
    assert!(
        alone < late,
        "the comparison shows something: {alone} {late}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes"]
async fn the_cached_share_at_full_size() {
    let number = |name: &str, default: usize| {
        let set = std::env::var(name).ok().and_then(|text| text.parse().ok());
        set.unwrap_or(default)
    };
    let size = Size {
        engines: number("WARMROUTE_SHARE_ENGINES", 160),
        blocks: number("WARMROUTE_SHARE_BLOCKS", 160),
        requests: number("WARMROUTE_SHARE_REQUESTS", 1_000),
    };
    let [warm, late, alone] = compare(size).await;
    assert!(late > warm - 0.03, "{warm} {late} {alone}");
}
