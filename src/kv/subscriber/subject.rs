//! What a subscriber follows, and what all subscribers share.

use std::sync::Arc;

use super::joins::Joins;
use super::metrics::Metrics;
use super::status_board::StatusBoard;
use crate::ids::{Model, WorkerId};
use crate::kv::indexes::PrefixIndexes;
use crate::kv::stream;
use crate::kv::tree_copies::TreeSource;

#[derive(Clone, Debug)]
pub struct Subject {
    pub worker: WorkerId,
    /// For logs and metrics.
    pub name: Arc<str>,
    /// `HOST:PORT`: what other replicas know the worker by.
    pub address: Arc<str>,
    pub rank: u32,
    /// The worker has no other rank.
    pub is_only_rank: bool,
    pub model: Model,
    /// The engine caches pages in a radix tree, each at most once, and names them by their tokens: SGLang.
    pub caches_pages: bool,
}

#[derive(Clone)]
pub struct Shared {
    pub indexes: Arc<PrefixIndexes>,
    pub board: Arc<StatusBoard>,
    pub metrics: Metrics,
    pub settings: stream::Settings,
    pub on_cache_lost: OnCacheLost,
    pub joins: Joins,
    /// Other replicas, if there are any.
    pub trees: Option<Arc<dyn TreeSource>>,
}

/// Called when a worker has lost its cache or may have: its process restarted, or it cleared the cache.
pub type OnCacheLost = Arc<dyn Fn(WorkerId) + Send + Sync>;

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}
