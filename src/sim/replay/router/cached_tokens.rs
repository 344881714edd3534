//! How much of a prompt each worker has cached, as a router of a replay knows it. Pure.

use smallvec::SmallVec;

use crate::ids::{ViewIndex, WorkerId};
use crate::kv::predicted::PredictedIndex;
use crate::sim::replay::workload::{Job, tokens_of};

/// The cached tokens of one prompt, by worker.
pub(super) enum CachedTokens<'a> {
    Exact {
        tokens: Vec<u32>,
        owners: SmallVec<[ViewIndex; 8]>,
    },
    /// The workers with the longest cached prefix are known; others are looked up on demand.
    Predicted {
        index: &'a PredictedIndex,
        job: &'a Job,
        owners: SmallVec<[ViewIndex; 8]>,
        max_cached_elsewhere: usize,
    },
}

impl<'a> CachedTokens<'a> {
    pub(super) fn exact(tokens: Vec<u32>, max_owners: usize, seed: u64) -> Self {
        let mut owners: SmallVec<[ViewIndex; 8]> = ViewIndex::range(0..tokens.len())
            .filter(|index| tokens[index.get()] > 0)
            .collect();
        let order = |index: &ViewIndex| {
            let worker = index.get();
            (u32::MAX - tokens[worker], tie_breaker(seed, worker))
        };
        if owners.len() > max_owners && max_owners > 0 {
            owners.select_nth_unstable_by_key(max_owners - 1, order);
        }
        owners.truncate(max_owners);
        CachedTokens::Exact { tokens, owners }
    }

    pub(super) fn predicted(index: &'a PredictedIndex, job: &'a Job, max_owners: usize) -> Self {
        let overlap = index.overlap(&job.blocks, max_owners, job.seed);
        let max_cached_elsewhere = match overlap.last() {
            Some(last) if overlap.len() == max_owners => last.blocks as usize,
            _ => 0,
        };
        CachedTokens::Predicted {
            index,
            job,
            owners: overlap
                .iter()
                .map(|owner| ViewIndex::new(owner.worker.0 as usize))
                .collect(),
            max_cached_elsewhere,
        }
    }

    pub(super) fn owners(&self) -> &[ViewIndex] {
        match self {
            CachedTokens::Exact { owners, .. } | CachedTokens::Predicted { owners, .. } => owners,
        }
    }

    pub(super) fn tokens(&self, index: ViewIndex) -> u32 {
        match self {
            CachedTokens::Exact { tokens, .. } => tokens[index.get()],
            CachedTokens::Predicted {
                index: predicted,
                job,
                owners,
                max_cached_elsewhere,
            } => {
                let blocks = if owners.contains(&index) {
                    &job.blocks[..]
                } else {
                    &job.blocks[..*max_cached_elsewhere]
                };
                let depth = predicted.depth(WorkerId(index.get() as u32), blocks);
                tokens_of(&job.blocks, depth as usize)
            }
        }
    }
}

/// A pseudo-random number per request and worker, so that ties do not always go to the same worker.
pub(super) fn tie_breaker(seed: u64, worker_index: usize) -> u64 {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    bytes[8..].copy_from_slice(&(worker_index as u64).to_le_bytes());
    xxhash_rust::xxh3::xxh3_64(&bytes)
}
