//! The indexes, one for each model and block size, under one bound on their memory.

use std::num::NonZeroU32;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use prometheus::{IntCounter, IntGauge};
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use tracing::warn;

use super::index::Index;
use super::index::budget::Budget;
use super::radix::Listed;
use crate::ids::{Model, WorkerId};
use crate::observe::metrics::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// What all indexes together may take. Past it, the deepest blocks of the worker that stored
    /// nothing for the longest time are forgotten first. An eighth is kept for indexes that come later.
    pub memory_bytes_max: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            // 40 million blocks that no two workers share, at about 50 bytes: 600 million tokens.
            memory_bytes_max: 2 << 30,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Metrics {
    blocks: IntGauge,
    bytes: IntGauge,
    dropped: IntCounter,
    /// So many must be dropped before the log tells of it again.
    told: Arc<AtomicU64>,
}

impl Metrics {
    pub fn new(registry: &Registry) -> Self {
        Self {
            blocks: registry.gauge(
                "warmroute_kv_index_blocks",
                "Blocks that workers reported as cached, those of several workers once.",
            ),
            bytes: registry.gauge(
                "warmroute_kv_index_bytes",
                "Memory of the indexes over reported blocks.",
            ),
            dropped: registry.counter(
                "warmroute_kv_index_dropped_blocks_total",
                "Reported blocks that were forgotten, or not stored, because of the memory bound.",
            ),
            told: Arc::default(),
        }
    }

    #[inline]
    pub(super) fn count(&self, before: u64, after: u64) {
        if after != before {
            self.blocks.add(after as i64 - before as i64);
        }
    }

    pub(super) fn cut(&self, blocks: u64, key: &Key) {
        self.dropped.inc_by(blocks);
        // At the first, and then whenever they have doubled: at its bound, every event drops some.
        let dropped = self.dropped.get();
        if dropped < self.told.load(Relaxed) {
            return;
        }
        self.told.store(dropped * 2, Relaxed);
        warn!(
            model = &*key.0,
            block_size = key.1,
            blocks = dropped,
            "cache index is at its memory bound; blocks forgotten so far"
        );
    }
}

pub type Key = (Model, NonZeroU32);

type ByModel = FxHashMap<Model, SmallVec<[(NonZeroU32, Arc<Index>); 1]>>;

#[derive(Debug)]
pub struct Forest {
    budget: Arc<Budget>,
    metrics: Metrics,
    /// Every index that anyone holds, and how many trees it has.
    indexes: Mutex<FxHashMap<Key, (Weak<Index>, usize)>>,
    /// Those that have trees.
    planted: ArcSwap<ByModel>,
    me: Weak<Self>,
}

impl Forest {
    pub fn new(settings: Settings, registry: &Registry) -> Arc<Self> {
        let metrics = Metrics::new(registry);
        Arc::new_cyclic(|me| Self {
            budget: Budget::new(settings.memory_bytes_max, metrics.bytes.clone()),
            metrics,
            indexes: Mutex::default(),
            planted: ArcSwap::default(),
            me: me.clone(),
        })
    }

    /// The index of a model and block size. It lives as long as somebody has it or a tree in it.
    pub fn index(&self, model: &Model, block_size: NonZeroU32) -> Arc<Index> {
        let key = (model.clone(), block_size);
        let mut indexes = self.indexes.lock();
        if let Some(index) = indexes.get(&key).and_then(|(index, _)| index.upgrade()) {
            return index;
        }
        indexes.retain(|_, (index, _)| index.strong_count() > 0);
        let index = Arc::new(Index::new(
            self.budget.clone(),
            self.metrics.clone(),
            self.me.clone(),
            key.clone(),
        ));
        indexes.insert(key, (Arc::downgrade(&index), 0));
        index
    }

    /// The indexes of a model that have trees.
    pub fn of(&self, model: &str) -> SmallVec<[(NonZeroU32, Arc<Index>); 1]> {
        self.planted.load().get(model).cloned().unwrap_or_default()
    }

    /// Every index that has trees, by model and block size.
    pub fn all(&self) -> Vec<(Key, Arc<Index>)> {
        let planted = self.planted.load();
        let mut all: Vec<(Key, Arc<Index>)> = planted
            .iter()
            .flat_map(|(model, of)| {
                of.iter()
                    .map(|(block_size, index)| ((model.clone(), *block_size), index.clone()))
            })
            .collect();
        all.sort_by(|(a, _), (b, _)| a.cmp(b));
        all
    }

    /// All that is known of one rank of a worker, parents before children. Events wait meanwhile.
    pub fn list(&self, worker: WorkerId, rank: u32) -> Vec<Listed> {
        let indexes = self.all().into_iter();
        indexes
            .flat_map(|(_, index)| index.list_of(worker, rank))
            .collect()
    }

    pub(super) fn planted(&self, key: &Key, index: &Arc<Index>) {
        let mut indexes = self.indexes.lock();
        let Some((_, trees)) = indexes.get_mut(key) else {
            return;
        };
        *trees += 1;
        if *trees == 1 {
            let mut planted = ByModel::clone(&self.planted.load());
            let of = planted.entry(key.0.clone()).or_default();
            of.push((key.1, index.clone()));
            self.planted.store(Arc::new(planted));
        }
    }

    pub(super) fn felled(&self, key: &Key) {
        let mut indexes = self.indexes.lock();
        let Some((_, trees)) = indexes.get_mut(key) else {
            return;
        };
        *trees -= 1;
        if *trees == 0 {
            let mut planted = ByModel::clone(&self.planted.load());
            if let Some(of) = planted.get_mut(&key.0) {
                of.retain(|(block_size, _)| *block_size != key.1);
                if of.is_empty() {
                    planted.remove(&key.0);
                }
            }
            self.planted.store(Arc::new(planted));
        }
    }
}
