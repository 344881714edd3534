//! The prefix indexes, one for each model and block size, under one memory limit.

use std::num::NonZeroU32;
use std::sync::{Arc, Weak};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::index::{IndexKey, MemoryBudget, Metrics, PrefixIndex, TreeBlock};
use crate::ids::{Model, WorkerId};
use crate::observe::metrics::Registry;
use crate::units::SizeText;

/// The index of what workers report to have cached.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Memory of the index of all workers' cached blocks, at about 50 bytes a block: 2 GiB are 40 million blocks
    /// or 600 million tokens. When it is full, the blocks that were stored longest ago are dropped from it, for all
    /// workers that have them and the ends of chains first. What it has taken for blocks is used again, and given back
    /// when the last worker of a model has left; names and tables shrink before.
    #[serde(with = "SizeText")]
    #[schemars(extend("min" = "1MiB"))]
    pub max_index_memory: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_index_memory: 2 << 30,
        }
    }
}

/// Most models have one block size.
type BySize<T> = SmallVec<[(NonZeroU32, T); 1]>;

type ByModel = FxHashMap<Model, BySize<Weak<PrefixIndex>>>;

/// All prefix indexes. Readers take a snapshot and no lock.
#[derive(Debug)]
pub struct PrefixIndexes {
    budget: Arc<MemoryBudget>,
    metrics: Metrics,
    indexes: ArcSwap<ByModel>,
    /// Held while an index is added.
    adding: Mutex<()>,
}

impl PrefixIndexes {
    pub fn new(settings: Settings, registry: &Registry) -> Arc<Self> {
        let metrics = Metrics::new(registry);
        Arc::new(Self {
            budget: MemoryBudget::new(settings.max_index_memory, metrics.bytes.clone()),
            metrics,
            indexes: ArcSwap::default(),
            adding: Mutex::default(),
        })
    }

    /// The index of a model and block size. It lives as long as something has it or a tree in it.
    pub fn index(&self, model: &Model, block_size: NonZeroU32) -> Arc<PrefixIndex> {
        let _adding = self.adding.lock();
        let current = self.indexes.load();
        let sizes = current.get(model).into_iter().flatten();
        let mut of_size = sizes.filter(|(size, _)| *size == block_size);
        if let Some(index) = of_size.find_map(|(_, index)| index.upgrade()) {
            return index;
        }
        let mut indexes = ByModel::clone(&current);
        indexes.retain(|_, sizes| {
            sizes.retain(|(_, index)| index.strong_count() > 0);
            !sizes.is_empty()
        });
        let index = Arc::new(PrefixIndex::new(
            self.budget.clone(),
            self.metrics.clone(),
            (model.clone(), block_size),
        ));
        let sizes = indexes.entry(model.clone()).or_default();
        sizes.push((block_size, Arc::downgrade(&index)));
        self.indexes.store(Arc::new(indexes));
        index
    }

    /// The indexes of a model that have trees.
    pub fn of(&self, model: &str) -> BySize<Arc<PrefixIndex>> {
        let indexes = self.indexes.load();
        indexes.get(model).map(with_trees).unwrap_or_default()
    }

    /// Every index that has trees, by model and block size.
    pub fn all(&self) -> Vec<(IndexKey, Arc<PrefixIndex>)> {
        let mut all = Vec::new();
        for (model, sizes) in self.indexes.load().iter() {
            let indexes = with_trees(sizes).into_iter();
            all.extend(indexes.map(|(size, index)| ((model.clone(), size), index)));
        }
        all.sort_by(|(a, _), (b, _)| a.cmp(b));
        all
    }

    /// All blocks of one dp rank of a worker, parents before children. Lookups and events go on meanwhile.
    pub fn list(&self, worker: WorkerId, rank: u32) -> Vec<TreeBlock> {
        let indexes = self.all().into_iter();
        indexes
            .flat_map(|(_, index)| index.list_of(worker, rank))
            .collect()
    }
}

fn with_trees(sizes: &BySize<Weak<PrefixIndex>>) -> BySize<Arc<PrefixIndex>> {
    let indexes = sizes.iter().filter_map(|(size, index)| {
        let index = index.upgrade().filter(|index| index.has_trees())?;
        Some((*size, index))
    });
    indexes.collect()
}
