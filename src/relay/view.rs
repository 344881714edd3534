//! The live fleet as a decision sees it.

use std::ops::Range;
use std::time::Instant;

use xxhash_rust::xxh3::xxh3_64;

use super::cached_prefix::{CachedPrefixes, TopOwners};
use crate::fleet::handoff::Connector;
use crate::fleet::{Group, Worker};
use crate::ids::WorkerId;
use crate::prompt::Api;
use crate::routing::{Cached, State, View};

/// What a worker of the view is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// A whole request, or what follows a prompt that another computes.
    Decode,
    /// A prompt, sent over this API, for another that fetches its blocks by this connector.
    Prefill(Connector, Api),
}

/// Load is read as it is now. Places are those of the group's workers that do the task, from 0.
#[derive(Debug)]
pub struct LiveView<'a> {
    group: &'a Group,
    held: &'a CachedPrefixes<'a>,
    holders: TopOwners,
    task: Task,
    places: Range<usize>,
    now: Instant,
    excluded: &'a [WorkerId],
}

impl<'a> LiveView<'a> {
    pub fn new(
        group: &'a Group,
        held: &'a CachedPrefixes<'a>,
        task: Task,
        now: Instant,
        excluded: &'a [WorkerId],
    ) -> Self {
        let places = match task {
            Task::Decode => group.decode(),
            Task::Prefill(..) => group.prefill(),
        };
        Self {
            group,
            holders: held.owners(places.clone()),
            held,
            task,
            places,
            now,
            excluded,
        }
    }

    pub(super) fn held(&self) -> &CachedPrefixes<'a> {
        self.held
    }

    /// A place of the view as one of the group.
    pub fn in_group(&self, place: usize) -> usize {
        self.places.start + place
    }

    /// Whether it is known where what a worker computes is to be fetched.
    pub(super) fn is_met(&self, place: usize) -> bool {
        match self.task {
            Task::Prefill(connector, api) if connector.needs_peer() => {
                let peer = self.worker(place).peer.load();
                // A Responses request goes to a rank of the engine's choice, which nobody is told.
                peer.as_ref()
                    .is_some_and(|peer| api != Api::Responses || peer.ranks().len() == 1)
            }
            _ => true,
        }
    }

    /// Whether what a worker computes is fetched, as a rule.
    pub(super) fn hands_over(&self, place: usize) -> bool {
        match self.task {
            Task::Decode => true,
            Task::Prefill(..) => self.worker(place).kv_transfer_breaker.may_admit(self.now),
        }
    }

    fn worker(&self, place: usize) -> &Worker {
        &self.group.workers[self.in_group(place)]
    }
}

impl View for LiveView<'_> {
    fn len(&self) -> usize {
        self.places.len()
    }

    fn state(&self, place: usize) -> State {
        let worker = self.worker(place);
        let can = self.task == Task::Decode || self.is_met(place) && self.hands_over(place);
        let is_free = worker.breaker.may_admit(self.now) && !self.excluded.contains(&worker.id);
        State {
            is_usable: can && is_free,
            requests: worker.load.requests(),
            queued_tokens: worker.load.queued_tokens(),
            decode_tokens: worker.load.decode_tokens(),
        }
    }

    fn queued_tokens(&self, place: usize) -> u64 {
        self.worker(place).load.queued_tokens()
    }

    fn identity(&self, place: usize) -> u64 {
        xxh3_64(self.worker(place).name.as_bytes())
    }

    fn prefix_owners(&self) -> &[usize] {
        self.holders.worker_indexes()
    }

    fn max_cached_elsewhere(&self) -> u32 {
        self.holders.others_max()
    }

    fn cached(&self, place: usize) -> Cached {
        self.held.cached(self.in_group(place))
    }
}
