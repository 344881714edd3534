//! What workers and their dp ranks reported of one prompt, and what they are computing of it.

use serde::Serialize;

use crate::fleet::Places;
use crate::ids::RankPlace;
use crate::kv::index::RankPrefix;
use crate::kv::unconfirmed::UnconfirmedBlocks;
use crate::relay::prompt::prompt_blocks::TokenBlocks;
use crate::routing::{Cached, TierCredit};

/// Where the knowledge of a worker's cached prefix comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PrefixSource {
    /// The worker's KV events.
    Exact,
    /// The worker computes the prefix or has just computed it, and has not reported it yet.
    Unconfirmed,
    /// What the worker was sent: its KV events do not reach the router, the prompt's tokens are not known,
    /// or the engine tokenizes differently.
    Predicted,
    /// Nothing: KV events of the worker are followed, but none has come yet, so nothing counts as cached. Only
    /// explanations say so.
    Unknown,
}

/// A rank's prefix in tokens.
pub(in crate::relay) fn cached(prefix: &RankPrefix, size: u32) -> Cached {
    Cached {
        gpu: prefix.gpu_blocks.saturating_mul(size),
        cpu: prefix.cpu_blocks().saturating_mul(size),
        disk: prefix.disk_blocks.saturating_mul(size),
    }
}

/// What is cached of a prompt at one place.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkerPrefix {
    pub(super) place: RankPlace,
    /// How many of the dp ranks that may get the request reported any block.
    ranks: u32,
    pub(super) cached: Cached,
    /// Tokens in the GPU that `cached` is worth.
    pub(super) credit: u32,
    pub(super) source: PrefixSource,
}

/// The prefixes at the places of a request. A lookup by place is one step, since every worker may own a
/// prompt's first blocks.
#[derive(Debug)]
pub(super) struct ReportedPrefixes {
    /// For each place one plus its position in `list`, or 0.
    positions: Vec<u32>,
    list: Vec<WorkerPrefix>,
}

impl ReportedPrefixes {
    /// Looks up a prompt: what events reported, or, where it is worth more, what is unconfirmed.
    pub(super) fn find(
        prompt: &TokenBlocks,
        places: Places<'_>,
        unconfirmed: &UnconfirmedBlocks,
        credit: &TierCredit,
        (max_owners, seed): (usize, u64),
    ) -> Self {
        let mut found = Self::find_exact(prompt, places, credit);
        for sized in &prompt.sizes {
            for owner in unconfirmed.overlap(&sized.prefix_keys, max_owners, seed) {
                let Some(place) = places.of_cache_owner(owner.worker) else {
                    continue;
                };
                let reusable = prompt.reusable(sized).len() as u32;
                let blocks = owner.blocks.min(reusable);
                let tokens = blocks.saturating_mul(sized.shape.size.get());
                let prefix = found.entry(place);
                if prefix.credit < tokens {
                    prefix.set_in_gpu(tokens, PrefixSource::Unconfirmed);
                }
            }
        }
        found
    }

    /// What events reported. Where a request cannot be pinned to one of a worker's dp ranks, the one with the least
    /// counts, since the request may go to any of them.
    fn find_exact(prompt: &TokenBlocks, places: Places<'_>, credit: &TierCredit) -> Self {
        let mut reported = Self {
            positions: vec![0; places.len()],
            list: Vec::new(),
        };
        let mut found = Vec::new();
        for sized in &prompt.sizes {
            found.clear();
            let locals = prompt.reusable(sized);
            sized.index.overlap(prompt.root, locals, &mut found);
            for rank in &found {
                // None for a worker that is down or serves another model.
                let Some(place) = places.of_rank(rank.worker, rank.rank) else {
                    continue;
                };
                let cached = cached(rank, sized.shape.size.get());
                let worth = cached.credit(credit);
                let prefix = reported.entry(place);
                if prefix.ranks == 0 || worth < prefix.credit {
                    prefix.cached = cached;
                    prefix.credit = worth;
                }
                prefix.ranks += 1;
            }
        }
        for prefix in &mut reported.list {
            let has_rank_without = prefix.ranks != places.event_ranks(prefix.place);
            if has_rank_without {
                prefix.cached = Cached::default();
                prefix.credit = 0;
            }
        }
        reported
    }

    pub(super) fn entry(&mut self, place: RankPlace) -> &mut WorkerPrefix {
        let position = &mut self.positions[place.get()];
        if *position == 0 {
            self.list.push(WorkerPrefix {
                place,
                ranks: 0,
                cached: Cached::default(),
                credit: 0,
                source: PrefixSource::Exact,
            });
            *position = self.list.len() as u32;
        }
        &mut self.list[*position as usize - 1]
    }

    #[inline]
    pub(super) fn get(&self, place: RankPlace) -> Option<&WorkerPrefix> {
        let position = self.positions[place.get()].checked_sub(1)?;
        Some(&self.list[position as usize])
    }

    /// The places with any of the prompt cached.
    pub(super) fn with_credit(&self) -> impl Iterator<Item = &WorkerPrefix> {
        self.list.iter().filter(|prefix| prefix.credit > 0)
    }
}

impl WorkerPrefix {
    pub(super) fn set_in_gpu(&mut self, tokens: u32, source: PrefixSource) {
        self.cached = Cached::in_gpu(tokens);
        self.credit = tokens;
        self.source = source;
    }
}
