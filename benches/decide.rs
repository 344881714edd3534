//! Lookup and decision: who holds this prompt, and who gets the request.
//!
//! Budget: 5 µs at 1,000 workers, each with 50 conversations of its own and a system prompt that
//! all of them hold.

use std::hint::black_box;
use std::time::Instant;

use criterion::BenchmarkId;
use criterion::Criterion;
use criterion::criterion_group;
use criterion::criterion_main;
use warmroute::ids::Block;
use warmroute::ids::WorkerId;
use warmroute::kv::block;
use warmroute::kv::predicted::Metrics;
use warmroute::kv::predicted::Predicted;
use warmroute::kv::predicted::Settings;
use warmroute::observe::metrics::Registry;
use warmroute::routing;
use warmroute::routing::Request;
use warmroute::routing::State;
use warmroute::routing::View;

/// A fleet whose loads are a table and whose caches are the real index.
struct Fleet<'a> {
    states: &'a [State],
    index: &'a Predicted,
    prompt: &'a [Block],
    holders: Vec<usize>,
    blocks: Vec<u32>,
    others_max: usize,
}

impl View for Fleet<'_> {
    fn len(&self) -> usize {
        self.states.len()
    }
    fn state(&self, place: usize) -> State {
        self.states[place]
    }
    fn identity(&self, place: usize) -> u64 {
        place as u64
    }
    fn holders(&self) -> &[usize] {
        &self.holders
    }
    fn cached_tokens(&self, place: usize) -> u32 {
        // As the router's own view does: the deepest are known, the others hold at most as much.
        match self.holders.iter().position(|holder| *holder == place) {
            Some(known) => self.blocks[known] * 16,
            None => {
                self.index
                    .depth(WorkerId(place as u32), &self.prompt[..self.others_max])
                    * 16
            }
        }
    }
}

fn prompt(system: u64, user: u64) -> Vec<Block> {
    let locals = (0..8)
        .map(|n| system << 32 | n)
        .chain((0..24).map(|n| user << 16 | n));
    block::chain(
        block::start("m", None),
        locals
            .map(|local| (local, 16))
            .collect::<Vec<_>>()
            .into_iter(),
    )
}

#[expect(clippy::disallowed_methods, reason = "a bench has no tokio clock")]
fn decide(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decide");
    for workers in [10u32, 100, 1_000] {
        // Every worker holds the system prompt that all requests share, and 50 conversations.
        let index = Predicted::new(
            Settings::default(),
            Metrics::new(&Registry::default()),
            Instant::now(),
        );
        for worker in 0..workers {
            for user in 0..50 {
                let prompt = prompt(1, u64::from(worker) * 50 + user);
                index.record(Instant::now(), WorkerId(worker), 0, &prompt);
            }
        }
        let states: Vec<State> = (0..workers)
            .map(|worker| State {
                is_usable: true,
                requests: worker % 7,
                pending_tokens: u64::from(worker % 13) * 100,
                decode_tokens: u64::from(worker % 5) * 2_000,
            })
            .collect();
        let settings = routing::Settings::default();
        let mut user = 0;
        group.bench_function(BenchmarkId::new("cache_aware", workers), |bencher| {
            bencher.iter(|| {
                user = (user + 17) % (u64::from(workers) * 50);
                let prompt = prompt(1, user);
                let overlap = index.overlap(&prompt, settings.holders as usize, user);
                let view = Fleet {
                    states: &states,
                    index: &index,
                    prompt: &prompt,
                    holders: overlap
                        .iter()
                        .map(|holder| holder.worker.0 as usize)
                        .collect(),
                    blocks: overlap.iter().map(|holder| holder.blocks).collect(),
                    others_max: overlap.last().map_or(0, |last| last.blocks as usize),
                };
                let request = Request {
                    prompt_tokens: 512,
                    seed: user,
                    ..Request::default()
                };
                black_box(routing::decide(&settings, &request, &view))
            });
        });
    }
    group.finish();
}

criterion_group!(benches, decide);
criterion_main!(benches);
