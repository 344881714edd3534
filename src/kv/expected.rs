//! Blocks on their way to a worker: what it was just asked to compute and has not told of yet.
//!
//! A worker's cache events say what it holds, but only once it is computed. Between the choice of a
//! worker and that event its next sibling must see it coming, or a burst of them scatters. So a
//! request's blocks count as held from its choice until its prompt is computed, and a little longer,
//! for the event to come. A worker without events needs none of this: `predicted` counts at once.
//!
//! Nothing here waits for an event in particular: one that comes early does no harm, and for one that
//! never comes the grace ends.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use dashmap::{DashMap, Entry};
use prometheus::{IntCounter, IntGauge};
use rustc_hash::FxBuildHasher;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::block::{Local, Path, Root};
use super::{Holder, Overlap};
use crate::ids::{BlockHash, WorkerId};
use crate::observe::metrics::Registry;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// How long a prompt's blocks count as held after its first token, without an event of them.
    pub grace_ms: u64,
    /// Marks of all workers together, about 60 bytes each. What finds no room is not counted as held.
    pub marks_max: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            // Events come a step after the first token; this outlives a batch that has to be asked
            // for again.
            grace_ms: 3_000,
            // 60 MB: 5,000 prompts of 200 marks at a time.
            marks_max: 1_000_000,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Metrics {
    marks: IntGauge,
    refused: IntCounter,
}

impl Metrics {
    pub fn new(registry: &Registry) -> Self {
        Self {
            marks: registry.gauge(
                "warmroute_expected_marks",
                "Places in prompts that workers are computing, or have just computed.",
            ),
            refused: registry.counter(
                "warmroute_expected_refused_marks_total",
                "Places in prompts that were not counted as coming, for want of room.",
            ),
        }
    }
}

/// Places of a prompt under which it is known here: each of its first 32 blocks, and 32 at each
/// doubling of the length after that. A prompt of 8,000 blocks has 280 of them, and what two prompts
/// share is known to 1/32.
pub type Marks = Arc<[Mark]>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Names the prefix that ends here.
    pub path: BlockHash,
    /// How many blocks that is.
    pub blocks: u32,
}

/// The marks of a prompt, given all of its full blocks.
pub fn marks(root: Root, locals: &[Local]) -> Marks {
    let mut path = Path::start(root);
    let mut marks = Vec::with_capacity(locals.len().min(64));
    for (local, depth) in locals.iter().zip(0..) {
        path = path.step(*local, depth);
        let blocks = depth + 1;
        if is_marked(blocks) {
            let path = BlockHash(path.mixed());
            marks.push(Mark { path, blocks });
        }
    }
    marks.into()
}

/// Depends on the place alone, or two prompts that share a start would not share its marks.
fn is_marked(blocks: u32) -> bool {
    let stride = 1 << blocks.max(1).ilog2().saturating_sub(5);
    blocks.is_multiple_of(stride)
}

/// What is on its way to any worker.
#[derive(Debug)]
pub struct Expected {
    coming: DashMap<BlockHash, Holders, FxBuildHasher>,
    /// Entries of all holders.
    count: AtomicU64,
    settings: Settings,
    metrics: Metrics,
    born: Instant,
}

/// In the order of their workers.
type Holders = SmallVec<[Expectation; 2]>;

#[derive(Clone, Copy, Debug)]
struct Expectation {
    worker: WorkerId,
    /// Requests that have not computed it yet.
    requests: u32,
    /// Since the index was made: how long it counts when there is no such request.
    until_ms: u64,
}

impl Expectation {
    fn counts(&self, now_ms: u64) -> bool {
        self.requests > 0 || now_ms < self.until_ms
    }
}

impl Expected {
    pub fn new(settings: Settings, metrics: Metrics, now: Instant) -> Arc<Self> {
        Arc::new(Self {
            coming: DashMap::default(),
            count: AtomicU64::new(0),
            settings,
            metrics,
            born: now,
        })
    }

    /// Counts a prompt as held by the worker that was chosen for it.
    pub fn expect(self: &Arc<Self>, worker: WorkerId, marks: &Marks) -> Coming {
        let mut marked = 0;
        // From the start on: where there is no room for all, what counts is still a prompt's start.
        for mark in marks.iter() {
            if !self.add(worker, mark.path) {
                self.metrics.refused.inc_by((marks.len() - marked) as u64);
                break;
            }
            marked += 1;
        }
        Coming {
            expected: self.clone(),
            worker,
            marks: marks.clone(),
            marked,
        }
    }

    /// Up to `limit` workers that will hold the most of a prompt, the deepest first.
    pub fn overlap(&self, now: Instant, marks: &[Mark], limit: usize) -> Overlap {
        let now_ms = self.milliseconds(now);
        let mut found = Overlap::new();
        let mut end = marks.len();
        // Who is to hold a mark is to hold all before it: the deepest that anyone has, then the next
        // ones above it that more workers have.
        while found.len() < limit {
            let known = found.len();
            let depth = marks[..end].partition_point(|mark| self.has_more(now_ms, *mark, known));
            let Some(deepest) = depth.checked_sub(1) else {
                break;
            };
            self.collect(now_ms, marks[deepest], limit, &mut found);
            end = deepest;
        }
        found
    }

    /// How many of a prompt's first blocks one worker will hold.
    pub fn depth(&self, now: Instant, worker: WorkerId, marks: &[Mark]) -> u32 {
        let now_ms = self.milliseconds(now);
        let depth = marks.partition_point(|mark| {
            self.coming.get(&mark.path).is_some_and(|holders| {
                place_of(&holders, worker).is_ok_and(|place| holders[place].counts(now_ms))
            })
        });
        depth.checked_sub(1).map_or(0, |last| marks[last].blocks)
    }

    /// A worker's process is another one: what it has computed is gone. Requests that it was still
    /// computing fail, and take back theirs.
    pub fn forget(&self, worker: WorkerId) {
        self.retain(|it| {
            if it.worker == worker {
                it.until_ms = 0;
            }
            it.worker != worker || it.requests > 0
        });
    }

    /// Frees what counts no more. To be called now and then.
    pub fn sweep(&self, now: Instant) {
        let now_ms = self.milliseconds(now);
        self.retain(|it| it.counts(now_ms));
    }

    /// How many marks are remembered.
    pub fn len(&self) -> u64 {
        self.count.load(Relaxed)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether more than `known` workers are to hold a mark.
    fn has_more(&self, now_ms: u64, mark: Mark, known: usize) -> bool {
        self.coming.get(&mark.path).is_some_and(|holders| {
            let mut counting = holders.iter().filter(|it| it.counts(now_ms));
            counting.nth(known).is_some()
        })
    }

    fn collect(&self, now_ms: u64, mark: Mark, limit: usize, found: &mut Overlap) {
        let Some(holders) = self.coming.get(&mark.path) else {
            return;
        };
        for it in holders.iter().filter(|it| it.counts(now_ms)) {
            if found.len() < limit && !found.iter().any(|known| known.worker == it.worker) {
                found.push(Holder {
                    worker: it.worker,
                    blocks: mark.blocks,
                });
            }
        }
    }

    fn add(&self, worker: WorkerId, path: BlockHash) -> bool {
        let mut holders = self.coming.entry(path).or_default();
        let place = match place_of(&holders, worker) {
            Ok(known) => {
                holders[known].requests += 1;
                return true;
            }
            Err(place) => place,
        };
        let has_room = self.count.fetch_add(1, Relaxed) < self.settings.marks_max;
        if has_room {
            let new = Expectation {
                worker,
                requests: 1,
                until_ms: 0,
            };
            holders.insert(place, new);
            self.metrics.marks.inc();
        } else {
            self.count.fetch_sub(1, Relaxed);
        }
        let is_empty = holders.is_empty();
        drop(holders);
        if is_empty {
            self.coming
                .remove_if(&path, |_, holders| holders.is_empty());
        }
        has_room
    }

    /// One request less that is to compute this. `until_ms` is 0 if it did not.
    fn settle(&self, worker: WorkerId, path: BlockHash, until_ms: u64) {
        let Entry::Occupied(mut holders) = self.coming.entry(path) else {
            return;
        };
        let Ok(place) = place_of(holders.get(), worker) else {
            return;
        };
        let it = &mut holders.get_mut()[place];
        it.requests = it.requests.saturating_sub(1);
        it.until_ms = it.until_ms.max(until_ms);
        if it.requests == 0 && it.until_ms == 0 {
            holders.get_mut().remove(place);
            self.subtract(1);
            if holders.get().is_empty() {
                holders.remove();
            }
        }
    }

    fn retain(&self, keep: impl Fn(&mut Expectation) -> bool) {
        self.coming.retain(|_, holders| {
            let before = holders.len();
            holders.retain(&keep);
            self.subtract(before - holders.len());
            !holders.is_empty()
        });
    }

    fn subtract(&self, marks: usize) {
        self.count.fetch_sub(marks as u64, Relaxed);
        self.metrics.marks.sub(marks as i64);
    }

    fn milliseconds(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.born).as_millis() as u64
    }
}

/// Where a worker's is among them, or where it would be.
fn place_of(holders: &Holders, worker: WorkerId) -> Result<usize, usize> {
    holders.binary_search_by_key(&worker, |it| it.worker)
}

/// A request whose prompt a worker is computing. Dropped before that is done, it takes back what it
/// counted.
#[must_use = "dropping it says that the worker does not compute the prompt"]
#[derive(Debug)]
pub struct Coming {
    expected: Arc<Expected>,
    worker: WorkerId,
    marks: Marks,
    /// How many of them were counted and are not settled yet.
    marked: usize,
}

impl Coming {
    /// The first token has come: the blocks are there, and events of them are under way.
    pub fn on_first_token(mut self, now: Instant) {
        let grace = Duration::from_millis(self.expected.settings.grace_ms);
        self.settle(self.expected.milliseconds(now + grace));
    }

    fn settle(&mut self, until_ms: u64) {
        for mark in &self.marks[..std::mem::take(&mut self.marked)] {
            self.expected.settle(self.worker, mark.path, until_ms);
        }
    }
}

impl Drop for Coming {
    fn drop(&mut self) {
        self.settle(0);
    }
}

#[cfg(test)]
mod tests;
