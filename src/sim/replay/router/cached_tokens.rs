//! How much of a prompt each worker has cached, as a router of a replay knows it. Pure.

use crate::ids::{ViewIndex, WorkerId};
use crate::kv::predicted::PredictedIndex;
use crate::sim::replay::workload::{Job, tokens_of};

pub(super) struct CachedTokens {
    /// By worker.
    tokens: Vec<u32>,
    /// Some of the workers with the longest cached prefixes.
    pub(super) owners: Vec<ViewIndex>,
}

impl CachedTokens {
    pub(super) fn exact(tokens: Vec<u32>, max_owners: usize, seed: u64) -> Self {
        let mut owners: Vec<ViewIndex> = ViewIndex::range(0..tokens.len())
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
        Self { tokens, owners }
    }

    pub(super) fn predicted(
        index: &PredictedIndex,
        job: &Job,
        workers: usize,
        max_owners: usize,
    ) -> Self {
        let overlap = index.overlap(&job.blocks, max_owners, job.seed);
        let max_cached_elsewhere = match overlap.last() {
            Some(last) if overlap.len() == max_owners => last.blocks as usize,
            _ => 0,
        };
        let mut max_blocks = vec![max_cached_elsewhere; workers];
        let mut owners = Vec::with_capacity(overlap.len());
        for owner in &overlap {
            let worker = owner.worker.0 as usize;
            max_blocks[worker] = job.blocks.len();
            owners.push(ViewIndex::new(worker));
        }
        let cached = |(worker, max_blocks): (usize, &usize)| {
            let depth = index.depth(WorkerId(worker as u32), &job.blocks[..*max_blocks]);
            tokens_of(&job.blocks, depth as usize)
        };
        let tokens = max_blocks.iter().enumerate().map(cached).collect();
        Self { tokens, owners }
    }

    /// The longest of them.
    pub(super) fn most(&self) -> u32 {
        self.tokens.iter().copied().max().unwrap_or(0)
    }

    pub(super) fn tokens(&self, index: ViewIndex) -> u32 {
        self.tokens[index.get()]
    }
}

/// A pseudo-random number per request and worker, so that ties do not always go to the same worker.
pub(super) fn tie_breaker(seed: u64, worker_index: usize) -> u64 {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    bytes[8..].copy_from_slice(&(worker_index as u64).to_le_bytes());
    xxhash_rust::xxh3::xxh3_64(&bytes)
}
