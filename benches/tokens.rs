//! From a request body to token ids, with and without a cached prefix of the conversation.
//!
//! Budgets: text that is not cached, 5 MB/s a core; the next turn of 500 tokens in a conversation of 100,000 tokens, 2 ms
//! from body to ids; a repeated 2 KB prompt, well below the 30 us that a request may cost the router.
//!
//! Measured on a 2-core virtual machine that ran eight other processes (wall time: minimum and median of 100 samples,
//! without link-time optimization; repeat on a quiet machine). Next turn of 2 KB in a 400 KB chat: 0.9 and 1.6 ms, of
//! which 0.7 ms are reading the body and rendering; 2.2 and 4.9 ms before texts were moved instead of copied and freed
//! memory was kept (`app::process_setup`). A repeated 2 KB chat: 6.6 and 12 us. New text: 256 KB of few different words
//! in 1.2 ms at best; real text with a vocabulary of 64,000 words, 21 MB/s, where the crate `tokenizers` had 2.4 MB/s in
//! the same run.

use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use serde_json::Map;
use warmroute::app::process_setup;
use warmroute::observe::metrics::Registry;
use warmroute::prompt::Api;
use warmroute::prompt::cache::{self, Cache};
use warmroute::prompt::render::{Options, Renderer, Templates};
use warmroute::prompt::template::Template;
use warmroute::prompt::tokenizer::{self, Tokenizer};
use warmroute::prompt::vocabulary::Vocabulary;

const WORDS: &[&str] = &[
    "the",
    "worker",
    "that",
    "holds",
    "a",
    "prompt's",
    "start",
    "is",
    "warm",
    "for",
    "it",
    "42",
    "größer",
    "don't",
    "tokens",
    "def f(x):",
    "世界",
    "(see below)",
    "HTTP/1.1",
    "naïve",
    "and",
    "so",
    "on",
    "--",
    "\"quoted\"",
    "1,000",
];

fn file(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name);
    std::fs::read_to_string(path).expect("a fixture is there")
}

fn vocabulary(name: &str) -> Vocabulary {
    // Set the variable to measure with the vocabulary of a real model.
    let json = match std::env::var("WARMROUTE_BENCH_TOKENIZER") {
        Ok(path) => std::fs::read_to_string(path).expect("the tokenizer is readable"),
        Err(_) => file(&format!("tokenizers/{name}.json")),
    };
    Vocabulary::new(serde_json::from_str(&json).expect("it is JSON")).expect("it is a tokenizer")
}

fn tokenizer(max_cache_memory: u64) -> Arc<Tokenizer> {
    let registry = Registry::default();
    let settings = cache::Settings { max_cache_memory };
    let renderer = Renderer::new(
        Templates {
            plain: Some(Template::new(&file("templates/chatml.jinja")).expect("it compiles")),
            with_tools: None,
        },
        Map::new(),
        Options::default(),
    );
    Arc::new(Tokenizer::new(
        renderer,
        vocabulary("qwen2"),
        Arc::new(Cache::new(&settings, 1, cache::Metrics::new(&registry))),
        tokenizer::Metrics::new(&registry),
    ))
}

/// Random text without repeated lines.
fn text(bytes: usize, seed: &mut u64) -> String {
    let mut text = String::with_capacity(bytes + 100);
    while text.len() < bytes {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let word = (*seed >> 33) as usize;
        text.push_str(WORDS[word % WORDS.len()]);
        if word.is_multiple_of(7) {
            text.push_str(&format!("{:x}", *seed >> 48));
        }
        text.push_str(if word.is_multiple_of(23) { ".\n" } else { " " });
    }
    text
}

fn chat(turns: &[String]) -> Vec<u8> {
    let messages: Vec<_> = turns
        .iter()
        .enumerate()
        .map(|(i, text)| {
            let role = if i % 2 == 0 { "user" } else { "assistant" };
            serde_json::json!({"role": role, "content": text})
        })
        .collect();
    serde_json::json!({"model": "m", "messages": messages})
        .to_string()
        .into_bytes()
}

fn benches(criterion: &mut Criterion) {
    process_setup::prepare();
    let mut seed = 1;
    let bare = vocabulary("qwen2");

    let mut group = criterion.benchmark_group("new text");
    group.throughput(Throughput::Bytes(256 << 10));
    group.bench_function("256 KB", |bencher| {
        bencher.iter_batched(
            || text(256 << 10, &mut seed),
            |text| {
                let mut ids = Vec::new();
                for piece in bare.pieces(&text) {
                    bare.encode(piece, &mut ids).expect("it encodes");
                }
                ids
            },
            BatchSize::LargeInput,
        );
    });
    group.finish();

    // About four bytes a token.
    let mut turns: Vec<String> = (0..100).map(|_| text(4_000, &mut seed)).collect();
    turns.push(String::new());
    let cached = tokenizer(64 << 20);
    let mut group = criterion.benchmark_group("chat of 400 KB");
    group.bench_function("next turn of 2 KB", |bencher| {
        bencher.iter_batched(
            || {
                *turns.last_mut().expect("there are turns") = text(2_000, &mut seed);
                chat(&turns)
            },
            |body| cached.tokens(Api::Chat, &body, 0).expect("it is known"),
            BatchSize::LargeInput,
        );
    });
    let body = chat(&turns);
    group.bench_function("again", |bencher| {
        bencher.iter(|| {
            cached
                .tokens(Api::Chat, black_box(&body), 0)
                .expect("it is known")
        });
    });
    group.bench_function("rendered alone", |bencher| {
        bencher.iter(|| {
            cached
                .render(Api::Chat, black_box(&body), 0)
                .expect("it renders")
        });
    });
    group.finish();

    let body = chat(&[text(2_000, &mut seed)]);
    criterion.bench_function("chat of 2 KB, again", |bencher| {
        bencher.iter(|| {
            cached
                .tokens(Api::Chat, black_box(&body), 0)
                .expect("it is known")
        });
    });
}

criterion_group!(tokens, benches);
criterion_main!(tokens);
