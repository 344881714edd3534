//! Random engines beside the plainest set of what they cache: whatever they do, publish in one batch, lose on the way, or
//! forget when they restart, the tree never has a block that its engine has not, and misses none once its state says so.

mod lmcache;
mod sglang;
mod vllm;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use super::*;
use crate::kv::index::{CopiedBlocks, GraftCursor};
use crate::kv::page_fold::{CopiedPages, PageCopyCursor};
use crate::kv::stream::{EventStream, Step, Steps};

/// In which tiers a block is, by its name.
pub(super) type Held = BTreeMap<u64, [bool; Tier::COUNT]>;

const GPU: usize = Tier::Gpu as usize;

/// One life of an engine's process.
pub(super) trait Engine {
    fn new(random: &mut fastrand::Rng) -> Self;
    /// Whether it caches pages in a radix tree, each at most once in a tier.
    const CACHES_PAGES: bool = false;
    /// Does something, and adds what it reports to the batch.
    fn work(&mut self, random: &mut fastrand::Rng, events: &mut Vec<Event>);
    /// What it caches, in blocks as the tree has them.
    fn held(&self) -> Held;
    /// Whether the lower tiers are known as exactly as the GPU.
    fn knows_lower_tiers(&self) -> bool {
        true
    }
    /// Whether nothing says when this copy is gone.
    fn is_never_removed(&self, _: u64, _: usize) -> bool {
        false
    }
}

/// A batch, and what is true after it.
struct Published<E> {
    sequence: u64,
    batch: Batch,
    held: Held,
    after: E,
}

struct Process<E> {
    engine: E,
    history: Vec<Published<E>>,
}

enum Input {
    Live(usize, u64),
    Replayed(usize, u64),
    End,
}

struct World<E> {
    random: fastrand::Rng,
    now: Instant,
    /// Batches that an engine keeps for replays.
    kept: usize,
    lost_percent: u8,
    processes: Vec<Process<E>>,
    pending: Vec<Event>,
    is_connected: bool,
    live: VecDeque<Input>,
    replay: VecDeque<Input>,
    stream: EventStream<Batch>,
    tree: RankTree,
    /// The last batch applied: of which process, and its number.
    applied: Option<(usize, u64)>,
}

impl<E: Engine + Clone> World<E> {
    fn new(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let now = observe::now();
        let indexes = PrefixIndexes::new(indexes::Settings::default(), &Registry::default());
        let subject = Subject {
            caches_pages: E::CACHES_PAGES,
            ..subject()
        };
        let engine = E::new(&mut random);
        Self {
            now,
            kept: [2, 6, 1_000][random.usize(..3)],
            lost_percent: [0, 0, 5][random.usize(..3)],
            processes: vec![Process {
                engine,
                history: Vec::new(),
            }],
            pending: Vec::new(),
            is_connected: false,
            live: VecDeque::new(),
            replay: VecDeque::new(),
            stream: EventStream::new(stream::Settings::default(), now),
            tree: RankTree::new(indexes, &subject),
            applied: None,
            random,
        }
    }

    fn step(&mut self) {
        match self.random.u8(..100) {
            0..55 => {
                let process = self.processes.last_mut().unwrap();
                process.engine.work(&mut self.random, &mut self.pending);
            }
            55..75 => self.publish(),
            75..93 => self.deliver(),
            93..97 if !self.is_connected => self.connect(),
            93..97 => {}
            97 => self.cut(),
            98 => self.restart(),
            _ => {
                self.now += Duration::from_secs(1);
                let steps = self.stream.on_timeout(self.now);
                self.carry_out(steps);
            }
        }
        self.check();
    }

    fn publish(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let number = self.processes.len() - 1;
        let process = &mut self.processes[number];
        let sequence = process.history.len() as u64;
        process.history.push(Published {
            sequence,
            batch: Batch {
                events: std::mem::take(&mut self.pending),
                // Says which one it is.
                timestamp: (number * 1_000_000) as f64 + sequence as f64,
                ..Batch::default()
            },
            held: process.engine.held(),
            after: process.engine.clone(),
        });
        let is_lost = self.random.u8(..100) < self.lost_percent;
        if self.is_connected && !is_lost {
            self.live.push_back(Input::Live(number, sequence));
        }
    }

    fn deliver(&mut self) {
        if !self.is_connected {
            return;
        }
        let is_replay = !self.replay.is_empty() && (self.live.is_empty() || self.random.bool());
        let input = if is_replay {
            self.replay.pop_front()
        } else {
            self.live.pop_front()
        };
        let frame = |world: &Self, process: usize, sequence: u64| SourceBatch {
            sequence,
            digest: (process as u128) << 64 | u128::from(sequence),
            bytes: 10,
            snapshot: None,
            batch: Ok(world.published(process, sequence).batch.clone()),
        };
        let steps = match input {
            None => return,
            Some(Input::Live(process, sequence)) => {
                let frame = frame(self, process, sequence);
                self.stream.on_live(self.now, frame)
            }
            Some(Input::Replayed(process, sequence)) => {
                let frame = frame(self, process, sequence);
                self.stream.on_replayed(self.now, frame)
            }
            Some(Input::End) => self.stream.on_replay_end(self.now),
        };
        self.carry_out(steps);
    }

    fn published(&self, process: usize, sequence: u64) -> &Published<E> {
        let published = &self.processes[process].history[sequence as usize];
        assert_eq!(published.sequence, sequence);
        published
    }

    fn connect(&mut self) {
        self.is_connected = true;
        let steps = self.stream.on_connected(self.now, None, true);
        self.carry_out(steps);
    }

    fn cut(&mut self) {
        if self.is_connected {
            self.is_connected = false;
            self.live.clear();
            self.replay.clear();
            let steps = self.stream.on_disconnected(self.now);
            self.carry_out(steps);
        }
    }

    fn restart(&mut self) {
        self.cut();
        self.pending.clear();
        let engine = E::new(&mut self.random);
        self.processes.push(Process {
            engine,
            history: Vec::new(),
        });
    }

    fn carry_out(&mut self, steps: Steps<Batch>) {
        let mut is_whole = false;
        for step in steps {
            match step {
                Step::Apply { payload, .. } => {
                    let process = (payload.timestamp / 1e6) as usize;
                    let sequence = payload.timestamp as u64 % 1_000_000;
                    self.applied = Some((process, sequence));
                    let mut effect = BatchEffect::default();
                    self.tree.apply(&payload, &mut effect);
                    match effect.impact {
                        TreeImpact::None => {}
                        TreeImpact::Incomplete => self.stream.on_incomplete(),
                        TreeImpact::Unknown => {
                            let _ = self.stream.on_unknown_removal();
                            self.tree.clear();
                        }
                    }
                    is_whole = (is_whole || effect.cleared) && effect.impact == TreeImpact::None;
                }
                Step::Clear(_) => {
                    is_whole = false;
                    self.tree.clear();
                }
                Step::RequestReplay { first } => {
                    let number = self.processes.len() - 1;
                    let history = &self.processes[number].history;
                    let oldest = history.len().saturating_sub(self.kept) as u64;
                    let range = first.max(oldest)..history.len() as u64;
                    self.replay = range
                        .map(|sequence| Input::Replayed(number, sequence))
                        .collect();
                    self.replay.push_back(Input::End);
                }
                Step::RequestPeerTree | Step::TakePeerTree => unreachable!("there are no peers"),
            }
        }
        if is_whole {
            self.stream.on_engine_cleared();
        }
    }

    fn tree_held(&self) -> Held {
        let blocks = self.tree.tree().map(|(_, tree)| tree.list());
        let blocks = blocks.into_iter().flatten();
        blocks
            .map(|block| (block.name.0, block.copies.map(|copies| copies > 0)))
            .collect()
    }

    fn check(&self) {
        let state = self.stream.state();
        let Some((process, sequence)) = self.applied.filter(|_| state.counts_in_routing()) else {
            return;
        };
        let Published { held, after, .. } = self.published(process, sequence);
        let tree = self.tree_held();
        for (name, tiers) in &tree {
            let cached = held.get(name).copied().unwrap_or_default();
            for (tier, is_in_tree) in tiers.iter().enumerate() {
                let is_stale = *is_in_tree && !cached[tier] && !after.is_never_removed(*name, tier);
                assert!(!is_stale, "block {name} is stale in tier {tier}");
            }
        }
        if state != State::Live {
            return;
        }
        for (name, tiers) in held {
            let known = tree.get(name).copied().unwrap_or_default();
            for (tier, is_cached) in tiers.iter().enumerate() {
                let is_needed = tier == GPU || after.knows_lower_tiers();
                let is_missing = is_needed && *is_cached && !known[tier];
                assert!(!is_missing, "block {name} is missing in tier {tier}");
            }
        }
    }

    /// Everything arrives.
    fn settle(&mut self) {
        self.lost_percent = 0;
        self.publish();
        if !self.is_connected {
            self.connect();
        }
        for _ in 0..10_000 {
            self.deliver();
            self.check();
            if self.live.is_empty() && self.replay.is_empty() {
                break;
            }
        }
    }
}

/// Seeds that one run of the tests tries, for each engine.
const SEEDS: u64 = 1_000;

fn run<E: Engine + Clone>(seed: u64) -> bool {
    let mut world = World::<E>::new(seed);
    for _ in 0..300 {
        world.step();
    }
    world.settle();
    world.stream.state() == State::Live
}

/// `WARMROUTE_ENGINE_SEEDS` tries more of them.
fn run_all<E: Engine + Clone>() {
    let seeds = std::env::var("WARMROUTE_ENGINE_SEEDS");
    let seeds = seeds.ok().and_then(|seeds| seeds.parse().ok());
    let seeds = seeds.unwrap_or(SEEDS);
    let mut failed = Vec::new();
    let mut live = 0;
    for seed in 0..seeds {
        match std::panic::catch_unwind(|| run::<E>(seed)) {
            Ok(is_live) => live += u64::from(is_live),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
                failed.push((seed, text.lines().next().unwrap_or_default().to_owned()));
            }
        }
    }
    let shown = &failed[..failed.len().min(5)];
    assert!(failed.is_empty(), "{} seeds: {shown:?}", failed.len());
    // Otherwise nothing could be missing.
    assert!(
        live * 3 > seeds,
        "only {live} of {seeds} trees end complete"
    );
}

/// The seed in `WARMROUTE_ENGINE_SEED`.
#[test]
fn one_seed_of_each_engine() {
    if let Ok(seed) = std::env::var("WARMROUTE_ENGINE_SEED") {
        let seed = seed.parse().unwrap();
        run::<vllm::Vllm>(seed);
        run::<sglang::Sglang>(seed);
        run::<lmcache::WithStore>(seed);
    }
}

#[test]
fn a_random_vllm_is_known_as_it_is() {
    run_all::<vllm::Vllm>();
}

#[test]
fn a_random_sglang_is_known_as_it_is() {
    run_all::<sglang::Sglang>();
}

#[test]
fn a_random_vllm_is_known_as_it_is_whatever_a_store_beside_it_reports() {
    run_all::<lmcache::WithStore>();
}

/// A tree that begins as another replica's copy of this one.
fn copied(tree: &RankTree) -> Option<RankTree> {
    let (shape, own) = tree.tree()?;
    let mut blocks = CopiedBlocks::default();
    let mut cursor = own.begin_copy();
    while own.copy_next(&mut cursor, 7, &mut blocks) {}
    if blocks.is_empty() || blocks.orphans > 0 {
        return None;
    }
    let mut pages = CopiedPages::default();
    let mut cursor = PageCopyCursor::default();
    if let Some(fold) = &tree.pages.as_ref()?.fold {
        while fold.copy_next(&mut cursor, 5, &mut pages) {}
    }
    assert!(pages.is_consistent());
    let indexes = PrefixIndexes::new(indexes::Settings::default(), &Registry::default());
    let mut other = RankTree::new(indexes, &subject_of_pages());
    other.begin_graft(*shape, &tree.filter.learned(), tree.has_matching_names());
    let mut cursor = GraftCursor::default();
    while other.tree_mut()?.graft_next(&mut cursor, 7, &blocks) {}
    assert_eq!(cursor.missing, 0);
    if !pages.is_empty() {
        let mut cursor = PageCopyCursor::default();
        let fold = other.pages.as_mut()?.begin_graft(pages.page_size)?;
        while fold.graft_next(&mut cursor, 5, &pages) {}
        assert_eq!(fold.take_forgotten(), 0);
    }
    Some(other)
}

#[test]
fn another_replicas_tree_of_pages_goes_on_as_its_own_does() {
    let mut compared = 0;
    for seed in 0..300 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut engine = sglang::Sglang::new(&mut random);
        let indexes = PrefixIndexes::new(indexes::Settings::default(), &Registry::default());
        let mut trees = vec![RankTree::new(indexes, &subject_of_pages())];
        for _ in 0..60 {
            let mut events = Vec::new();
            for _ in 0..random.usize(1..4) {
                engine.work(&mut random, &mut events);
            }
            let batch = Batch {
                events,
                ..Batch::default()
            };
            for tree in &mut trees {
                let mut effect = BatchEffect::default();
                tree.apply(&batch, &mut effect);
                assert_eq!(effect.impact, TreeImpact::None, "seed {seed}");
                assert_eq!(effect.unknown_removals, 0, "seed {seed}");
            }
            let expected = engine.held();
            for tree in &trees {
                let blocks = tree.tree().map(|(_, tree)| tree.list());
                let held: Held = blocks
                    .into_iter()
                    .flatten()
                    .map(|block| (block.name.0, block.copies.map(|copies| copies > 0)))
                    .collect();
                assert_eq!(held, expected, "seed {seed}");
            }
            compared += u64::from(trees.len() > 1);
            if random.u8(..6) == 0
                && let Some(other) = copied(trees.last().unwrap())
            {
                trees.truncate(1);
                trees.push(other);
            }
        }
    }
    assert!(compared > 5_000, "{compared}");
}
