//! What workers without cache events hold, as far as we can guess: what we sent them, in the order of
//! use, bounded by what their caches hold, and aged.
//!
//! One tree for each worker decides what is kept (least recently used leaves first, so that a worker
//! that holds a block holds all before it), and a table over all workers answers who holds a block.
//! Because of that order, "how deep" is a binary search and needs no walk along the prompt.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use dashmap::DashMap;
use hashlink::LinkedHashMap;
use parking_lot::Mutex;
use prometheus::{IntCounter, IntGauge};
use rustc_hash::FxBuildHasher;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::{Holder, Overlap};
use crate::ids::{Block, BlockHash, WorkerId};
use crate::observe::metrics::Registry;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// Length of a prompt's first blocks, in bytes of text.
    pub block_bytes: u32,
    /// How many bytes of text make a token, on average.
    pub bytes_per_token: f64,
    /// Tokens that a worker's cache holds, for engines that do not say.
    pub tokens_per_worker: u64,
    /// How long a prompt that was not seen again counts as held.
    pub age_max_s: u32,
    /// Blocks of all workers together, about 120 bytes each.
    pub blocks_max: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            // 16 tokens of English, the usual block of an engine on a GPU.
            block_bytes: 64,
            bytes_per_token: 4.0,
            // About what an 80 GB GPU has left beside an 8B model.
            tokens_per_worker: 400_000,
            age_max_s: 3_600,
            // 240 MB: 2,000 long conversations on each of 10 workers.
            blocks_max: 2_000_000,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Metrics {
    blocks: IntGauge,
    capacity: IntCounter,
    memory: IntCounter,
    age: IntCounter,
    gone: IntCounter,
    retracted: IntCounter,
}

impl Metrics {
    pub fn new(registry: &Registry) -> Self {
        let forgotten = registry.counters(
            "warmroute_predicted_forgotten_blocks_total",
            "Blocks no longer believed to be held, by why: the worker's own capacity, the router's \
             memory, age, a process that is gone, or a request that the worker did not take.",
            &["reason"],
        );
        let of = |reason| forgotten.with_label_values(&[reason]);
        Self {
            blocks: registry.gauge(
                "warmroute_predicted_blocks",
                "Prompt blocks that workers are believed to hold.",
            ),
            capacity: of("capacity"),
            memory: of("memory"),
            age: of("age"),
            gone: of("gone"),
            retracted: of("retracted"),
        }
    }
}

/// The index over every worker and model.
#[derive(Debug)]
pub struct Predicted {
    /// Who holds a block, sorted.
    holders: DashMap<BlockHash, SmallVec<[WorkerId; 4]>, FxBuildHasher>,
    trees: DashMap<WorkerId, Arc<Mutex<Tree>>, FxBuildHasher>,
    /// As many as `trees` has; counting those takes all of its locks.
    tree_count: AtomicUsize,
    settings: Settings,
    metrics: Metrics,
    born: Instant,
}

/// One worker's blocks, least recently used first.
#[derive(Debug, Default)]
struct Tree {
    blocks: LinkedHashMap<BlockHash, Held, FxBuildHasher>,
    tokens: u64,
    /// Tokens of all prompts so far: a clock that stands still while nothing is used.
    used_tokens: u64,
    /// The worker left; nothing more is recorded.
    is_closed: bool,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    tokens: u32,
    /// Seconds since the index was made.
    used_s: u32,
    /// The tree's `used_tokens` then.
    used_at: u64,
}

impl Predicted {
    pub fn new(settings: Settings, metrics: Metrics, now: Instant) -> Self {
        Self {
            holders: DashMap::default(),
            trees: DashMap::default(),
            tree_count: AtomicUsize::new(0),
            settings,
            metrics,
            born: now,
        }
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Up to `limit` workers that hold the most of a prompt. Where many hold equally much, `seed`
    /// picks among them.
    pub fn overlap(&self, prompt: &[Block], limit: usize, seed: u64) -> Overlap {
        let mut found = Overlap::new();
        // The deepest block that anyone holds, then the next ones above it that more workers hold.
        let mut end = prompt.len();
        let mut known = 0;
        while found.len() < limit {
            let depth = partition(end, |place| self.holder_count(prompt[place]) > known);
            if depth == 0 {
                break;
            }
            let Some(holders) = self.holders.get(&prompt[depth - 1].path) else {
                break;
            };
            known = holders.len();
            let start = (seed % known.max(1) as u64) as usize;
            for worker in holders[start..].iter().chain(&holders[..start]) {
                if found.len() < limit && !found.iter().any(|holder| holder.worker == *worker) {
                    found.push(Holder {
                        worker: *worker,
                        blocks: depth as u32,
                    });
                }
            }
            end = depth - 1;
        }
        found
    }

    /// How many of a prompt's first blocks one worker holds.
    pub fn depth(&self, worker: WorkerId, prompt: &[Block]) -> u32 {
        let holds = |block: Block| {
            self.holders
                .get(&block.path)
                .is_some_and(|holders| holders.binary_search(&worker).is_ok())
        };
        partition(prompt.len(), |place| holds(prompt[place])) as u32
    }

    /// Counts a prompt as held by a worker, as of now. `capacity_tokens` is what the engine says it
    /// holds, 0 if it does not. Returns how many blocks counted as held before.
    pub fn record(
        &self,
        now: Instant,
        worker: WorkerId,
        capacity_tokens: u64,
        prompt: &[Block],
    ) -> usize {
        let tree = self.tree(worker);
        let used_s = self.seconds(now);
        let capacity_tokens = if capacity_tokens == 0 {
            self.settings.tokens_per_worker
        } else {
            capacity_tokens
        };
        // What is longer than the cache must not push everything else out of it.
        let fitting =
            prompt.partition_point(|block| u64::from(block.end_tokens) <= capacity_tokens);
        let prompt = &prompt[..fitting];
        let tree = &mut *tree.lock();
        if tree.is_closed || self.is_fresh(tree, prompt, used_s, capacity_tokens) {
            return prompt.len();
        }
        let mut held_before = 0;
        tree.used_tokens += prompt.last().map_or(0, |last| u64::from(last.end_tokens));
        let used_at = tree.used_tokens;
        // From the end to the start: leaves become the oldest.
        for (place, block) in prompt.iter().enumerate().rev() {
            match tree.blocks.to_back(&block.path) {
                Some(held) => {
                    held_before = held_before.max(place + 1);
                    held.used_s = used_s;
                    held.used_at = used_at;
                }
                None => {
                    let before = place
                        .checked_sub(1)
                        .map_or(0, |place| prompt[place].end_tokens);
                    let tokens = block.end_tokens - before;
                    tree.tokens += u64::from(tokens);
                    tree.blocks.insert(
                        block.path,
                        Held {
                            tokens,
                            used_s,
                            used_at,
                        },
                    );
                    self.metrics.blocks.inc();
                    let mut holders = self.holders.entry(block.path).or_default();
                    if let Err(place) = holders.binary_search(&worker) {
                        holders.insert(place, worker);
                    }
                }
            }
        }
        self.evict(tree, worker, capacity_tokens, used_s);
        held_before
    }

    /// Takes back what a record added, after `held_before` blocks: the worker did not take the request.
    /// A sibling that counted on the same blocks meanwhile loses them too: colder, not wrong.
    pub fn retract(&self, worker: WorkerId, prompt: &[Block], held_before: usize) {
        let Some(tree) = self.trees.get(&worker).map(|tree| tree.clone()) else {
            return;
        };
        let tree = &mut *tree.lock();
        for block in prompt.get(held_before..).unwrap_or_default() {
            if self.remove(tree, worker, block.path) {
                self.metrics.retracted.inc();
            }
        }
    }

    /// Drops all that a worker was believed to hold: its process is another one.
    pub fn forget(&self, worker: WorkerId) {
        if let Some(tree) = self.trees.get(&worker).map(|tree| tree.clone()) {
            self.clear(&mut tree.lock(), worker);
        }
    }

    /// Drops workers that are no longer there, and what nobody asked for in a long time. To be called
    /// now and then: requests only look at the worker that they go to.
    pub fn sweep(&self, now: Instant, is_listed: impl Fn(WorkerId) -> bool) {
        let trees: Vec<(WorkerId, Arc<Mutex<Tree>>)> = self
            .trees
            .iter()
            .map(|tree| (*tree.key(), tree.value().clone()))
            .collect();
        for (worker, tree) in trees {
            let tree = &mut *tree.lock();
            if is_listed(worker) {
                self.evict(tree, worker, u64::MAX, self.seconds(now));
            } else {
                self.clear(tree, worker);
                tree.is_closed = true;
                if self.trees.remove(&worker).is_some() {
                    self.tree_count.fetch_sub(1, Relaxed);
                }
            }
        }
    }

    /// Blocks and tokens that a worker is believed to hold.
    pub fn size(&self, worker: WorkerId) -> (usize, u64) {
        self.trees.get(&worker).map_or((0, 0), |tree| {
            let tree = tree.lock();
            (tree.blocks.len(), tree.tokens)
        })
    }

    /// Whether the whole prompt is held and was used so lately that its place in the order of use
    /// would hardly change. Repeated prompts then cost one look.
    fn is_fresh(&self, tree: &Tree, prompt: &[Block], now_s: u32, capacity_tokens: u64) -> bool {
        const FRESH: u64 = 64;
        let Some(held) = prompt.last().and_then(|last| tree.blocks.get(&last.path)) else {
            return false;
        };
        let age_s = now_s.saturating_sub(held.used_s);
        tree.used_tokens - held.used_at < capacity_tokens / FRESH
            && u64::from(age_s) <= u64::from(self.settings.age_max_s) / FRESH
    }

    fn tree(&self, worker: WorkerId) -> Arc<Mutex<Tree>> {
        if let Some(tree) = self.trees.get(&worker) {
            return tree.clone();
        }
        let new = || {
            self.tree_count.fetch_add(1, Relaxed);
            Arc::default()
        };
        self.trees.entry(worker).or_insert_with(new).clone()
    }

    /// Makes room: least recently used first, which is the end of a prompt before its start.
    fn evict(&self, tree: &mut Tree, worker: WorkerId, capacity_tokens: u64, now_s: u32) {
        let share = self.settings.blocks_max / self.tree_count.load(Relaxed).max(1) as u64;
        let blocks_max = share.max(1) as usize;
        let old_s = now_s.saturating_sub(self.settings.age_max_s);
        while let Some((path, held)) = tree.blocks.front().map(|(path, held)| (*path, *held)) {
            let reason = if tree.tokens > capacity_tokens {
                &self.metrics.capacity
            } else if tree.blocks.len() > blocks_max {
                &self.metrics.memory
            } else if held.used_s < old_s {
                &self.metrics.age
            } else {
                break;
            };
            self.remove(tree, worker, path);
            reason.inc();
        }
    }

    /// With the tree's lock held throughout, so that no record falls between tree and holders.
    fn clear(&self, tree: &mut Tree, worker: WorkerId) {
        self.metrics.gone.inc_by(tree.blocks.len() as u64);
        while let Some(path) = tree.blocks.front().map(|(path, _)| *path) {
            self.remove(tree, worker, path);
        }
    }

    fn remove(&self, tree: &mut Tree, worker: WorkerId, path: BlockHash) -> bool {
        let Some(held) = tree.blocks.remove(&path) else {
            return false;
        };
        tree.tokens -= u64::from(held.tokens);
        self.remove_holder(path, worker);
        self.metrics.blocks.dec();
        true
    }

    fn remove_holder(&self, path: BlockHash, worker: WorkerId) {
        let dashmap::Entry::Occupied(mut holders) = self.holders.entry(path) else {
            return;
        };
        if let Ok(place) = holders.get().binary_search(&worker) {
            holders.get_mut().remove(place);
        }
        if holders.get().is_empty() {
            holders.remove();
        }
    }

    fn holder_count(&self, block: Block) -> usize {
        self.holders
            .get(&block.path)
            .map_or(0, |holders| holders.len())
    }

    fn seconds(&self, now: Instant) -> u32 {
        now.saturating_duration_since(self.born)
            .min(Duration::from_secs(u64::from(u32::MAX)))
            .as_secs() as u32
    }
}

/// The first place of `0..end` where `holds` is false, given that it is true before and false after.
fn partition(end: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, end);
    // A repeated prompt is held whole, and a new one not at all: ask there first.
    if high > 0 && holds(high - 1) {
        return high;
    }
    while low < high {
        let middle = low + (high - low) / 2;
        if holds(middle) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

#[cfg(test)]
mod tests;
