//! Lookup and decision: who holds this prompt, and who gets the request; with the real index, fleet and
//! view. Every worker publishes its events, holds a system prompt that all requests share, and conversations of
//! its own.
//!
//! Bars: a decision, the lookup aside, costs at most 1.3 times as much with 1,000 workers as with 10; lookup
//! and decision for a prompt of 128k tokens take about 100 us together.
//!
//! 2 cores that others use, too; 2026-11-21, medians. Times of decisions are of 20,000 rounds in which the
//! fleets take turns; three runs agreed within a twelfth.
//!
//! | | 10 workers | 100 | 1,000 | 4,000 |
//! |---|---|---|---|---|
//! | decision, a worker has the conversation, ns | 109 | 121 | 136 | - |
//! | decision, no worker has any of it, ns | 72 | 229 | 228 | - |
//! | lookup of 2,100 tokens, the first 1,024 held by all, us | 0.60 | 2.0 | 11.7 | 40 |
//! | tokens to worker, 2,100 tokens, us | 1.9 | - | 11.8 | - |
//! | tokens to worker, 131,124 tokens, us | 41 | 45 (64 workers) | - | - |
//!
//! 1,000 workers beside 10 at the same moment: 1.23 times as much where a worker has the prompt (1.18 to
//! 1.28 over the runs; 1.40 while others were drawn also where none of them could win). Where no worker has
//! any of it, 3.2 times: 10 workers are looked at in their order, of more than 16 as many are drawn, and a
//! processor cannot guess which of those will be the least busy. That does not grow with the fleet: 100 and
//! 1,000 cost the same.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use serde_json::value::RawValue;
use warmroute::fleet::events::{Endpoint, Events, Transport};
use warmroute::fleet::health::Health;
use warmroute::fleet::in_flight::InFlight;
use warmroute::fleet::registry::{self, Registry};
use warmroute::fleet::{Facts, Group, Member, Role};
use warmroute::http::client;
use warmroute::kv::block;
use warmroute::kv::event::{EngineHash, Tier};
use warmroute::kv::index::{CopyReport, NewBlock, Parent, Tree};
use warmroute::kv::indexes::{self, PrefixIndexes};
use warmroute::kv::predicted::{self, PredictedIndex};
use warmroute::kv::subscriber::StatusBoard;
use warmroute::kv::tokenizer_check::{self, TokenizerCheck};
use warmroute::kv::unconfirmed::{self, UnconfirmedBlocks};
use warmroute::observe::metrics;
use warmroute::peers::routed::RoutedPrompts;
use warmroute::relay::Caches;
use warmroute::relay::choose::fleet_view::{FleetView, Task};
use warmroute::relay::prompt::cached_prefix::{CachedPrefixes, ViewRange};
use warmroute::relay::prompt::prompt_blocks::{Prompt, TokenBlocks};
use warmroute::routing::{self, PrefixCounts, Request};

const BLOCK: NonZeroU32 = NonZeroU32::new(16).unwrap();
/// Tokens at the beginning of a prompt that are the same for all.
const SYSTEM_TOKENS: u32 = 1_024;
const CONVERSATIONS: u32 = 10;
/// Decisions over one lookup: the clock's own cost is shared among them.
const DECISIONS: u64 = 16;

struct Fleet {
    group: Arc<Group>,
    caches: Caches,
    settings: routing::Settings,
    counts: PrefixCounts,
    _trees: Vec<Tree>,
    _load: Vec<InFlight>,
}

fn tokens(worker: u32, conversation: u32, len: u32) -> Vec<u32> {
    let own = (worker * CONVERSATIONS + conversation).wrapping_mul(2_654_435_761);
    (0..len)
        .map(|at| match at {
            0..SYSTEM_TOKENS => at,
            _ => at.wrapping_add(own) % 150_000,
        })
        .collect()
}

fn store(tree: &mut Tree, tokens: &[u32]) {
    let root = block::chain_root(None, None);
    let mut locals = Vec::new();
    block::hash_blocks(tokens, BLOCK, &mut locals);
    let mut path = block::PathHash::start(root);
    let blocks = locals.iter().zip(0..).map(|(local, depth)| {
        path = path.step(*local, depth);
        NewBlock {
            name: EngineHash(path.mixed()),
            local: *local,
        }
    });
    let blocks: Vec<NewBlock> = blocks.collect();
    tree.store(Parent::Root(root), &blocks, Tier::Gpu, CopyReport::OneMore)
        .expect("it begins at the root");
}

/// A fleet in which so many tokens of each worker's conversations are held.
#[expect(clippy::disallowed_methods, reason = "a bench has no tokio clock")]
fn fleet(workers: u32, held_tokens: u32) -> Fleet {
    let registry = metrics::Registry::default();
    let settings = registry::Settings {
        max_workers: workers as usize,
        ..registry::Settings::default()
    };
    let fleet = Registry::new(client::Settings::default(), settings);
    let member = |number: u32| Member {
        responses: Default::default(),
        prefill_rate: None,
        slots: None,
        name: format!("gpu-{number}"),
        address: format!("gpu-{number}:8000"),
        role: Role::Both,
        draining: false,
        authorization: None,
        tls: None,
        events: Events::At(vec![Endpoint::Grpc {
            address: format!("gpu-{number}:9000"),
            transport: Transport::default(),
        }]),
        labels: BTreeMap::new(),
        bootstrap: None,
        identity: None,
    };
    fleet.set_members("bench", (0..workers).map(member).collect());
    let card = RawValue::from_string("{}".to_owned()).expect("it is JSON");
    for status in &fleet.snapshot().workers {
        let facts = Facts {
            models: [("m".into(), card.clone())].into(),
            base: Some("m".into()),
            ..Facts::default()
        };
        fleet.set_facts(status.worker.id, facts);
        fleet.set_health(status.worker.id, Health::Up);
    }
    let group = fleet.snapshot().models["m"].clone();
    let indexes = PrefixIndexes::new(indexes::Settings::default(), &registry);
    let index = indexes.index(&"m".into(), BLOCK);
    let mut trees = Vec::new();
    let mut load = Vec::new();
    for (worker, number) in group.workers.iter().zip(0..) {
        let mut tree = index.add_tree(worker.id, 0);
        tree.set_visible(true);
        for conversation in 0..CONVERSATIONS {
            store(&mut tree, &tokens(number, conversation, held_tokens));
        }
        trees.push(tree);
        for request in 0..number % 7 {
            let mut running = InFlight::new(worker.clone(), 2_000 + request, number * 31 % 1_700);
            if request % 2 == 0 {
                running.on_first_token();
            }
            load.push(running);
        }
    }
    let now = Instant::now();
    let unconfirmed = UnconfirmedBlocks::new(
        unconfirmed::Settings::default(),
        unconfirmed::Metrics::new(&registry),
    );
    let predicted = Arc::new(PredictedIndex::new(
        predicted::Settings::default(),
        predicted::Metrics::new(&registry),
        now,
    ));
    let routed = RoutedPrompts::new(1, predicted.clone(), unconfirmed.clone(), &registry);
    let caches = Caches {
        indexes,
        board: Arc::new(StatusBoard::default()),
        unconfirmed,
        predicted,
        tokenizer_check: TokenizerCheck::new(tokenizer_check::Settings::default(), &registry).0,
        routed: Arc::new(routed),
    };
    Fleet {
        group,
        caches,
        settings: routing::Settings::default(),
        counts: PrefixCounts::new(Instant::now()),
        _trees: trees,
        _load: load,
    }
}

impl Fleet {
    fn prompt(&self, tokens: &[u32]) -> Prompt {
        Prompt {
            blocks: Vec::new(),
            exact: Some(TokenBlocks::new(
                &self.caches.indexes,
                &self.group,
                None,
                tokens,
            )),
        }
    }

    fn cached_prefixes<'a>(&'a self, prompt: &'a Prompt, seed: u64) -> CachedPrefixes<'a> {
        let credit = &self.settings.advanced.tier_credit;
        let max_owners = warmroute::routing::PREFIX_CANDIDATES;
        let places = &*self.group;
        CachedPrefixes::new(
            places,
            &self.caches,
            prompt,
            credit,
            (max_owners, seed),
            &self.counts,
        )
    }

    fn view<'a>(&'a self, prefixes: &'a CachedPrefixes<'a>, now: Instant) -> FleetView<'a> {
        FleetView::new(prefixes, Task::Decode, now, &[])
    }
}

fn request(tokens: &[u32], seed: u64) -> Request {
    Request {
        prompt_tokens: tokens.len() as u32,
        seed,
        ..Request::default()
    }
}

/// Prompts of workers all over the fleet; a turn longer than what is held.
fn prompts(workers: u32, len: u32) -> Vec<Vec<u32>> {
    let prompt = |number: u32| tokens(number * 37 % workers, number % CONVERSATIONS, len);
    (0..64).map(prompt).collect()
}

#[expect(clippy::disallowed_methods, reason = "a bench has no tokio clock")]
fn decision(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decide");
    for workers in [10, 100, 1_000, 4_000] {
        let fleet = fleet(workers, 2_048);
        let prompts = prompts(workers, 2_100);
        let asked: Vec<Prompt> = prompts.iter().map(|prompt| fleet.prompt(prompt)).collect();
        let now = Instant::now();
        let mut number = 0u64;
        group.bench_function(BenchmarkId::new("decision", workers), |bencher| {
            bencher.iter_custom(|iterations| {
                let mut spent = Duration::ZERO;
                for _ in 0..iterations {
                    number += 1;
                    let at = (number % 64) as usize;
                    let prefixes = fleet.cached_prefixes(&asked[at], number);
                    let view = fleet.view(&prefixes, now);
                    let started = Instant::now();
                    for draw in 0..DECISIONS {
                        let seed = number << 8 | draw;
                        let request = request(&prompts[at], seed);
                        black_box(routing::decide(&fleet.settings, &request, &view));
                    }
                    spent += started.elapsed();
                }
                spent / DECISIONS as u32
            });
        });
        group.bench_function(BenchmarkId::new("lookup", workers), |bencher| {
            bencher.iter(|| {
                number += 1;
                let prompt = &asked[(number % 64) as usize];
                let prefixes = fleet.cached_prefixes(prompt, number);
                let decode = ViewRange::of_workers((&*fleet.group).into(), fleet.group.decode());
                let owners = prefixes.owners(&decode, |worker| worker.breaker.may_admit(now));
                black_box(owners.indices.len())
            });
        });
    }
    group.finish();
}

/// 10 workers beside 1,000, turn and turn about: on a machine that others use, too, times are only to be
/// compared with those of the same moment.
#[expect(clippy::print_stdout, reason = "a bench prints what it measured")]
fn beside(_: &mut Criterion) {
    const ROUNDS: u64 = 20_000;
    let sizes = [10, 100, 1_000];
    let fleets = sizes.map(|workers| fleet(workers, 2_048));
    let warm = sizes.map(|workers| prompts(workers, 2_100));
    // No worker has any of it.
    let cold = sizes.map(|_| (0..64).map(|at| (at..2_100 + at).rev().collect()).collect());
    for (which, prompts) in [("warm", warm), ("cold", cold)] {
        let spent = spend(&fleets, &prompts, ROUNDS);
        let quartiles = |mut of: Vec<f64>| {
            of.sort_by(f64::total_cmp);
            [1, 2, 3].map(|quarter| of[of.len() * quarter / 4])
        };
        for (place, workers) in sizes.iter().enumerate() {
            let [low, middle, high] = quartiles(spent[place].clone());
            println!("{which} decision, {workers} workers: {middle:.0} ns ({low:.0} to {high:.0})");
        }
        let pairs = spent[0].iter().zip(&spent[2]);
        let [low, middle, high] = quartiles(pairs.map(|(from, to)| to / from).collect());
        println!(
            "{which}, 1,000 workers to 10 at the same moment: {middle:.2} ({low:.2} to {high:.2})"
        );
    }
}

/// Nanoseconds of a decision, by fleet and round.
#[expect(clippy::disallowed_methods, reason = "a bench has no tokio clock")]
fn spend(fleets: &[Fleet; 3], prompts: &[Vec<Vec<u32>>; 3], rounds: u64) -> [Vec<f64>; 3] {
    let now = Instant::now();
    let mut spent: [Vec<f64>; 3] = Default::default();
    for round in 0..rounds {
        for (place, fleet) in fleets.iter().enumerate() {
            let tokens = &prompts[place][(round % 64) as usize];
            let prompt = fleet.prompt(tokens);
            let prefixes = fleet.cached_prefixes(&prompt, round);
            let view = fleet.view(&prefixes, now);
            let started = Instant::now();
            for draw in 0..DECISIONS {
                let request = request(tokens, round << 8 | draw);
                black_box(routing::decide(&fleet.settings, &request, &view));
            }
            let nanoseconds = started.elapsed().as_nanos() as f64;
            spent[place].push(nanoseconds / DECISIONS as f64);
        }
    }
    spent
}

/// From known tokens to a worker: hashing, lookup, decision.
#[expect(clippy::disallowed_methods, reason = "a bench has no tokio clock")]
fn whole(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decide/whole");
    for (workers, len) in [(10, 2_048), (1_000, 2_048), (10, 131_072), (64, 131_072)] {
        let fleet = fleet(workers, len);
        let prompts = prompts(workers, len + 52);
        let now = Instant::now();
        let mut number = 0u64;
        let id = BenchmarkId::new(format!("{len} tokens"), workers);
        group.bench_function(id, |bencher| {
            bencher.iter(|| {
                number += 1;
                let tokens = &prompts[(number % 64) as usize];
                let prompt = fleet.prompt(tokens);
                let prefixes = fleet.cached_prefixes(&prompt, number);
                let view = fleet.view(&prefixes, now);
                black_box(routing::decide(
                    &fleet.settings,
                    &request(tokens, number),
                    &view,
                ))
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(50).measurement_time(Duration::from_secs(4));
    targets = beside, decision, whole
}
criterion_main!(benches);
