//! Reads a request body once: finds the fields, hashes the prompt in blocks, and chains the block hashes.
//!
//! Budget: 2 µs for a 2 KB chat, 100 µs for 200 KB (2 GB/s).

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use serde_json::json;
use warmroute::kv::text_block;
use warmroute::prompt::{self, Api};

fn peek(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("peek");
    let line = "The quick brown fox jumps over the lazy dog.\n";
    let bodies = [
        (
            "chat_2kb",
            chat(&"lorem ipsum dolor sit amet ".repeat(74), 1),
        ),
        (
            "chat_200kb",
            chat(&"lorem ipsum dolor sit amet ".repeat(7_400), 1),
        ),
        ("chat_200kb_escapes", chat(&line.repeat(4_500), 1)),
        (
            "chat_200kb_100_messages",
            chat(&"lorem ipsum dolor sit amet ".repeat(74), 100),
        ),
    ];
    for (name, body) in &bodies {
        group.throughput(Throughput::Bytes(body.len() as u64));
        group.bench_function(*name, |bencher| {
            bencher.iter(|| {
                let peek = prompt::peek(Api::Chat, black_box(body), 64).expect("the body is valid");
                let blocks = peek
                    .prompt
                    .blocks
                    .iter()
                    .map(|block| (block.hash, block.bytes / 4));
                text_block::chain(text_block::chain_root("m", None), blocks)
            });
        });
    }
    group.finish();
}

fn chat(text: &str, messages: usize) -> Vec<u8> {
    let message = json!({"role": "user", "content": text});
    let body = json!({"model": "m", "messages": vec![message; messages], "stream": true, "max_tokens": 64});
    body.to_string().into_bytes()
}

criterion_group!(benches, peek);
criterion_main!(benches);
