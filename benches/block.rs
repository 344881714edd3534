//! Hashes of token blocks: local hashes, then the path hashes that a lookup needs.
//!
//! Budget: 128k tokens in 100 µs: hashing a prompt must stay small beside looking it up.

use std::hint::black_box;
use std::num::NonZeroU32;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use warmroute::kv::block::{PathHash, SEGMENT_BLOCKS, chain_root, hash_blocks};

const TOKENS: u32 = 128 * 1024;

fn block(criterion: &mut Criterion) {
    let tokens: Vec<u32> = (0..TOKENS).map(|token| token * 7 % 150_000).collect();
    let mut group = criterion.benchmark_group("block");
    group.throughput(Throughput::Elements(u64::from(TOKENS)));
    for size in [16, 32, 64] {
        let size = NonZeroU32::new(size).expect("a literal");
        let mut found = Vec::new();
        group.bench_function(format!("locals/{size}"), |bencher| {
            bencher.iter(|| {
                found.clear();
                hash_blocks(black_box(&tokens), size, &mut found);
                found.len()
            });
        });
        group.bench_function(format!("paths/{size}"), |bencher| {
            bencher.iter(|| {
                let start = PathHash::start(chain_root(None, None));
                let segments = black_box(&found).chunks(SEGMENT_BLOCKS);
                segments.fold(start, |path, segment| path.segment(segment).1)
            });
        });
    }
    group.finish();
}

criterion_group!(benches, block);
criterion_main!(benches);
