//! The prefix indexes, one for each model and shape of blocks, under one memory limit.

use std::sync::{Arc, Weak};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::block::BlockShape;
use super::index::{IndexKey, MemoryAccount, MemoryBudget, Metrics, PrefixIndex, TreeBlock};
use crate::ids::{Model, WorkerId};
use crate::observe::metrics::Registry;
use crate::units::SizeText;

/// The index of what workers report to have cached.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Memory of the index of all workers' cached blocks, at about 50 bytes a block: 2 GiB are 40 million blocks
    /// or 600 million tokens. When it is full, the blocks that were stored longest ago are dropped from it, for all
    /// workers that have them and the ends of chains first. What blocks took is given back when they are removed.
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

/// Most models have blocks of one shape.
type ByShape<T> = SmallVec<[(BlockShape, T); 1]>;

type ByModel = FxHashMap<Model, ByShape<Weak<PrefixIndex>>>;

/// All prefix indexes. Readers take a snapshot and no lock.
#[derive(Debug)]
pub struct PrefixIndexes {
    budget: Arc<MemoryBudget>,
    page_budget: Arc<MemoryBudget>,
    metrics: Metrics,
    indexes: ArcSwap<ByModel>,
    /// Held while an index is added.
    adding: Mutex<()>,
}

impl PrefixIndexes {
    pub fn new(settings: Settings, registry: &Registry) -> Arc<Self> {
        let metrics = Metrics::new(registry);
        let budget = MemoryBudget::new(settings.max_index_memory, metrics.bytes.clone());
        Arc::new(Self {
            page_budget: budget.for_pages(),
            budget,
            metrics,
            indexes: ArcSwap::default(),
            adding: Mutex::default(),
        })
    }

    /// The index of a model and shape of blocks. It lives as long as something has it or a tree in it.
    pub fn index(&self, model: &Model, shape: impl Into<BlockShape>) -> Arc<PrefixIndex> {
        let shape = shape.into();
        let _adding = self.adding.lock();
        let current = self.indexes.load();
        let shapes = current.get(model).into_iter().flatten();
        let mut of_shape = shapes.filter(|(of, _)| *of == shape);
        if let Some(index) = of_shape.find_map(|(_, index)| index.upgrade()) {
            return index;
        }
        let mut indexes = ByModel::clone(&current);
        indexes.retain(|_, shapes| {
            shapes.retain(|(_, index)| index.strong_count() > 0);
            !shapes.is_empty()
        });
        let index = Arc::new(PrefixIndex::new(
            self.budget.clone(),
            self.metrics.clone(),
            (model.clone(), shape),
        ));
        let shapes = indexes.entry(model.clone()).or_default();
        shapes.push((shape, Arc::downgrade(&index)));
        self.indexes.store(Arc::new(indexes));
        index
    }

    /// An account for one rank's pages, within the memory limit of the indexes.
    pub fn page_memory(&self) -> MemoryAccount {
        MemoryAccount::new(self.page_budget.clone())
    }

    /// The indexes of a model that have trees.
    pub fn of(&self, model: &str) -> ByShape<Arc<PrefixIndex>> {
        let indexes = self.indexes.load();
        indexes.get(model).map(with_trees).unwrap_or_default()
    }

    /// Every index that has trees, by model and shape of blocks.
    pub fn all(&self) -> Vec<(IndexKey, Arc<PrefixIndex>)> {
        let mut all = Vec::new();
        for (model, shapes) in self.indexes.load().iter() {
            let indexes = with_trees(shapes).into_iter();
            all.extend(indexes.map(|(shape, index)| ((model.clone(), shape), index)));
        }
        all.sort_by(|(a, _), (b, _)| a.cmp(b));
        all
    }

    /// All blocks of one dp rank of a worker, parents before children. Lookups and events go on meanwhile.
    pub fn list(&self, worker: WorkerId, rank: u32) -> Vec<TreeBlock> {
        let indexes = self.all().into_iter();
        indexes
            .flat_map(|(_, index)| index.list_in_slices(worker, rank, || {}))
            .collect()
    }
}

fn with_trees(shapes: &ByShape<Weak<PrefixIndex>>) -> ByShape<Arc<PrefixIndex>> {
    let indexes = shapes.iter().filter_map(|(shape, index)| {
        let index = index.upgrade().filter(|index| index.has_trees())?;
        Some((*shape, index))
    });
    indexes.collect()
}
