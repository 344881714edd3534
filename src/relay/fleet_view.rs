//! The live fleet as a [`View`] for decisions.

use std::ops::Range;
use std::time::Instant;

use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64;

use super::cached_prefix::{CachedPrefixes, TopOwners};
use crate::fleet::kv_transfer::Connector;
use crate::fleet::{Group, Worker};
use crate::ids::WorkerId;
use crate::prompt::Api;
use crate::routing::{Backlog, Cached, State, View};

/// Workers with a request's adapter that are compared beside those with its prefix.
const MAX_ADAPTER_OWNERS: usize = 8;

/// What the chosen worker is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// A whole request, or a decode leg.
    Decode,
    /// A whole request, by a worker that takes no legs.
    Whole,
    /// A prefill leg over this API, with a KV transfer by this connector.
    Prefill(Connector, Api),
}

/// Load is read at the time of the call. Index 0 is the first of the group's workers that do the task.
#[derive(Debug)]
pub struct FleetView<'a> {
    group: &'a Group,
    held: &'a CachedPrefixes<'a>,
    holders: TopOwners,
    task: Task,
    range: Range<usize>,
    now: Instant,
    excluded: &'a [WorkerId],
    adapter_owners: SmallVec<[usize; MAX_ADAPTER_OWNERS]>,
}

impl<'a> FleetView<'a> {
    pub fn new(
        group: &'a Group,
        held: &'a CachedPrefixes<'a>,
        task: Task,
        now: Instant,
        excluded: &'a [WorkerId],
    ) -> Self {
        let range = match task {
            Task::Decode => group.decode(),
            Task::Whole => group.both(),
            Task::Prefill(..) => group.prefill(),
        };
        let adapter_owners = match group.is_adapter {
            true => adapter_owners(group, range.clone()),
            false => SmallVec::new(),
        };
        Self {
            adapter_owners,
            group,
            holders: held.owners(range.clone()),
            held,
            task,
            range,
            now,
            excluded,
        }
    }

    pub(super) fn held(&self) -> &CachedPrefixes<'a> {
        self.held
    }

    /// The worker's index in the group.
    pub fn in_group(&self, index: usize) -> usize {
        self.range.start + index
    }

    /// True if decode workers accept the address from which to fetch KV blocks from a prefill worker.
    pub(super) fn is_bootstrap_known(&self, index: usize) -> bool {
        match self.task {
            Task::Prefill(connector, api) if connector.needs_bootstrap() => {
                let bootstrap_info = self.worker(index).bootstrap_info.load();
                // The engine chooses the dp rank of a Responses request itself, and does not report it.
                bootstrap_info.as_ref().is_some_and(|bootstrap_info| {
                    api != Api::Responses || bootstrap_info.ranks().len() == 1
                })
            }
            _ => true,
        }
    }

    /// True if the circuit breaker of KV transfers from a prefill worker admits one.
    pub(super) fn may_transfer(&self, index: usize) -> bool {
        match self.task {
            Task::Decode | Task::Whole => true,
            Task::Prefill(..) => self.worker(index).kv_transfer_breaker.may_admit(self.now),
        }
    }

    fn worker(&self, index: usize) -> &Worker {
        &self.group.workers[self.in_group(index)]
    }
}

/// The least busy of the workers that have the group's adapter in their GPUs.
fn adapter_owners(group: &Group, range: Range<usize>) -> SmallVec<[usize; MAX_ADAPTER_OWNERS]> {
    let workers = group.workers[range].iter().enumerate();
    let owners = workers.filter(|(_, worker)| worker.adapters.has(&group.model));
    let mut owners: Vec<(u64, usize)> = owners
        .map(|(index, worker)| (worker.load.queued_tokens(), index))
        .collect();
    owners.sort_unstable();
    owners.truncate(MAX_ADAPTER_OWNERS);
    owners.into_iter().map(|(_, index)| index).collect()
}

impl View for FleetView<'_> {
    fn len(&self) -> usize {
        self.range.len()
    }

    fn state(&self, index: usize) -> State {
        let worker = self.worker(index);
        let can = self.is_bootstrap_known(index) && self.may_transfer(index);
        let is_free = worker.breaker.may_admit(self.now) && !self.excluded.contains(&worker.id);
        State {
            is_usable: can && is_free,
            requests: worker.load.requests(),
            queued_tokens: worker.load.queued_tokens(),
            decode_tokens: worker.load.decode_tokens(),
            time_weight: worker.load.time_weight(),
            lacks_adapter: self.group.is_adapter && !worker.adapters.has(&self.group.model),
        }
    }

    fn backlog(&self, index: usize) -> Backlog {
        let load = &self.worker(index).load;
        Backlog {
            queued_tokens: load.queued_tokens(),
            time_weight: load.time_weight(),
        }
    }

    fn min_time_weight(&self) -> f64 {
        let any = self.group.workers.first();
        any.map_or(1.0, |worker| worker.min_time_weight.get())
    }

    fn identity(&self, index: usize) -> u64 {
        xxh3_64(self.worker(index).name.as_bytes())
    }

    fn prefix_owners(&self) -> &[usize] {
        self.holders.worker_indexes()
    }

    fn adapter_owners(&self) -> &[usize] {
        &self.adapter_owners
    }

    fn max_cached_elsewhere(&self) -> u32 {
        self.holders.others_max()
    }

    fn cached(&self, index: usize) -> Cached {
        self.held.cached(self.in_group(index))
    }
}
