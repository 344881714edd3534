//! The live fleet as a [`View`] for decisions.

use std::time::Instant;

use smallvec::SmallVec;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::promised::Promised;
use crate::fleet::kv_transfer::Connector;
use crate::fleet::load::LoadShare;
use crate::fleet::{Places, Role, Worker};
use crate::ids::{RankPlace, ViewIndex, WorkerId, WorkerIndex};
use crate::prompt::Api;
use crate::relay::prompt::cached_prefix::{CachedPrefixes, TopOwners, ViewRange};
use crate::routing::{self, Backlog, Cached, Decision, Request, SharedPrefix, State, View};

/// Workers with a request's adapter that are compared beside those with its prefix.
const MAX_ADAPTER_OWNERS: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// A whole request, or a decode leg.
    Decode,
    /// A whole request, by a worker that takes no legs.
    Whole,
    /// A prefill leg over this API, with a KV transfer by this connector.
    Prefill(Connector, Api),
}

/// Load is read at the time of the call. The candidates are the places that do the task: workers, or dp ranks where the request
/// can be pinned to one.
#[derive(Debug)]
pub struct FleetView<'a> {
    places: Places<'a>,
    pub(in crate::relay) prefixes: &'a CachedPrefixes<'a>,
    owners: TopOwners,
    task: Task,
    range: ViewRange,
    now: Instant,
    excluded: &'a [WorkerId],
    /// What comes before the request, beside the workers' load.
    before: Option<&'a Promised>,
    adapter_owners: SmallVec<[ViewIndex; MAX_ADAPTER_OWNERS]>,
}

impl<'a> FleetView<'a> {
    pub fn new(
        prefixes: &'a CachedPrefixes<'a>,
        task: Task,
        now: Instant,
        excluded: &'a [WorkerId],
    ) -> Self {
        let places = prefixes.places;
        let group = places.group();
        let workers = match task {
            Task::Decode => group.decode(),
            Task::Whole => group.both(),
            Task::Prefill(..) => group.prefill(),
        };
        let range = ViewRange::of_workers(places, workers);
        let adapter_owners = if group.is_adapter {
            adapter_owners(places, &range, |worker| {
                is_free(worker, task, now, excluded)
            })
        } else {
            SmallVec::new()
        };
        Self {
            adapter_owners,
            places,
            owners: prefixes.owners(&range, |worker| is_free(worker, task, now, excluded)),
            prefixes,
            task,
            range,
            now,
            excluded,
            before: None,
        }
    }

    /// The view of a request that is behind others.
    #[must_use]
    pub(in crate::relay) fn behind(self, before: Option<&'a Promised>) -> Self {
        Self { before, ..self }
    }

    /// The request as far as the chosen worker computes it: a prefill leg has no answer.
    pub(in crate::relay) fn request(&self, request: &Request) -> Request {
        match self.task {
            Task::Prefill(..) => Request {
                answer_tokens: 0.0,
                ..*request
            },
            Task::Decode | Task::Whole => *request,
        }
    }

    pub(in crate::relay) fn worker_index(&self, index: ViewIndex) -> WorkerIndex {
        self.places.worker_index(self.place(index))
    }

    pub(in crate::relay) fn place(&self, index: ViewIndex) -> RankPlace {
        self.range.place(index)
    }

    /// The dp rank to pin the request to.
    pub(in crate::relay) fn rank(&self, index: ViewIndex) -> Option<u32> {
        self.places.rank(self.place(index))
    }

    /// The whole load of a place's worker, or its rank's, with what comes before the request.
    #[inline]
    fn share(&self, place: RankPlace, worker: &Worker, rank: Option<u32>) -> LoadShare {
        let load = match rank {
            None => worker.load.share(),
            Some(rank) => {
                let ranks = self.places.ranks_beside(place);
                worker.pinned.share(&worker.load, rank, ranks)
            }
        };
        match self.before {
            None => load,
            Some(before) => load.plus(before.everywhere(worker.id.cache_owner(rank))),
        }
    }

    /// True if decode workers accept the address from which to fetch KV blocks from a prefill worker.
    pub(in crate::relay) fn is_bootstrap_known(&self, index: ViewIndex) -> bool {
        match self.task {
            Task::Prefill(connector, api) if connector.needs_bootstrap() => {
                let bootstrap_info = self.worker(index).bootstrap_info.load();
                let rank = self.rank(index);
                bootstrap_info
                    .as_ref()
                    .is_some_and(|bootstrap_info| match rank {
                        Some(rank) => bootstrap_info.engine_id(rank).is_some(),
                        // The engine chooses the dp rank of a Responses request itself, and does not report it. SGLang's room
                        // stands for one.
                        None => {
                            api != Api::Responses
                                || connector == Connector::Sglang
                                || bootstrap_info.ranks().len() == 1
                        }
                    })
            }
            _ => true,
        }
    }

    /// True if the circuit breaker of KV transfers from a prefill worker admits one.
    pub(in crate::relay) fn may_transfer(&self, index: ViewIndex) -> bool {
        may_transfer(self.worker(index), self.task, self.now)
    }

    /// Seconds that the first token takes beside the steps of the worker, which is the same wherever a request goes in most
    /// fleets: the choice does not count it. That of a pair comes from the decode worker.
    pub(in crate::relay) fn overhead(&self, index: ViewIndex) -> f64 {
        match self.task {
            Task::Decode | Task::Whole => self.worker(index).overhead.get(),
            Task::Prefill(..) => 0.0,
        }
    }

    #[inline]
    fn is_free(&self, worker: &Worker) -> bool {
        is_free(worker, self.task, self.now, self.excluded)
    }

    /// A decision of this view with the worker's index and its rank.
    pub(in crate::relay) fn in_fleet(&self, decision: Decision<ViewIndex>) -> Decision {
        let mut expected = decision.expected;
        expected.first_token += self.overhead(decision.index);
        Decision {
            index: self.worker_index(decision.index),
            rank: self.rank(decision.index),
            reason: decision.reason,
            cached_tokens: decision.cached_tokens,
            shared: decision.shared,
            new_tokens: decision.new_tokens,
            cost: decision.cost,
            expected,
        }
    }

    pub(in crate::relay) fn worker(&self, index: ViewIndex) -> &'a Worker {
        self.places.worker(self.place(index))
    }
}

/// Whether the worker's circuit breakers admit requests for the task, and it is not excluded.
fn is_free(worker: &Worker, task: Task, now: Instant, excluded: &[WorkerId]) -> bool {
    let is_admitted = worker.breaker.may_admit(now) && may_transfer(worker, task, now);
    is_admitted && !excluded.contains(&worker.id)
}

fn may_transfer(worker: &Worker, task: Task, now: Instant) -> bool {
    match task {
        Task::Decode | Task::Whole => true,
        Task::Prefill(..) => worker.kv_transfer_breaker.may_admit(now),
    }
}

/// The least busy of the places whose workers have the group's adapter in their GPUs and can be sent requests: those that fail
/// have the least to do.
fn adapter_owners(
    places: Places<'_>,
    range: &ViewRange,
    is_free: impl Fn(&Worker) -> bool,
) -> SmallVec<[ViewIndex; MAX_ADAPTER_OWNERS]> {
    let model = &places.group().model;
    let all = range.indices();
    let all = all.map(|index| (index, places.worker(range.place(index))));
    let owners = all.filter(|(_, worker)| worker.adapters.has(model) && is_free(worker));
    let mut owners: Vec<(u64, ViewIndex)> = owners
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

    fn state(&self, index: ViewIndex) -> State {
        let place = self.place(index);
        let (worker, rank) = (self.places.worker(place), self.places.rank(place));
        let share = self.share(place, worker, rank);
        let group = self.places.group();
        let mut usual = worker.load.usual_requests();
        let (mut slots, mut waiting) = (worker.slots(), worker.load.waiting());
        if rank.is_some() {
            // Those of a worker with several ranks are of all of them.
            let ranks = self.places.ranks_beside(place).max(1);
            usual /= f64::from(ranks);
            slots /= ranks;
            waiting /= ranks;
        }
        let mut speed = worker.load.speed.get();
        if worker.role == Role::Prefill {
            // What was learnt at others: it has no answers that could go on beside prompts.
            speed.overlap = 0.0;
        }
        State {
            is_usable: self.is_bootstrap_known(index) && self.is_free(worker),
            requests: share.requests,
            queued_tokens: share.queued_tokens,
            delayed: routing::delayed(share.requests, usual),
            context_tokens: share.context_tokens,
            slots: slots.max(1),
            waiting,
            speed,
            lacks_adapter: group.is_adapter && !worker.adapters.has(&group.model),
        }
    }

    fn backlog(&self, index: ViewIndex) -> Backlog {
        let place = self.place(index);
        let (worker, rank) = (self.places.worker(place), self.places.rank(place));
        let (requests, queued_tokens) = match (rank, self.before) {
            (None, None) => (worker.load.requests(), worker.load.queued_tokens()),
            _ => {
                let share = self.share(place, worker, rank);
                (share.requests, share.queued_tokens)
            }
        };
        let speed = worker.load.speed.get();
        Backlog {
            queued_tokens,
            prompt_token: speed.prompt_token,
            // Those that usually come besides, and what a prefill worker has not learnt, only add to it.
            delayed: f64::from(requests) * (1.0 - speed.overlap),
        }
    }

    fn mean_prompt_token(&self) -> f64 {
        self.places.group().speed.mean_prompt_token.get()
    }

    fn waiting_prompts(&self) -> f64 {
        // Decode workers of pairs have no prompts that wait, and requests may be for dp ranks.
        self.places.group().speed.waiting_prompts.get() / self.len().max(1) as f64
    }

    fn min_prompt_token(&self) -> f64 {
        self.places.group().speed.min_prompt_token.get()
    }

    fn identity(&self, index: ViewIndex) -> u64 {
        let name = self.worker(index).name.as_bytes();
        match self.rank(index) {
            None => xxh3_64(name),
            Some(rank) => xxh3_64_with_seed(name, u64::from(rank) + 1),
        }
    }

    fn owner(&self, index: ViewIndex) -> usize {
        self.worker_index(index).get()
    }

    fn prefix_owners(&self) -> &[ViewIndex] {
        &self.owners.indices
    }

    fn adapter_owners(&self) -> &[ViewIndex] {
        &self.adapter_owners
    }

    fn max_cached_elsewhere(&self) -> u32 {
        self.owners.others_max
    }

    fn shared_prefix(&self) -> SharedPrefix {
        let Some((index, tokens, key)) = self.owners.longest else {
            return SharedPrefix::default();
        };
        // Nobody finds a copy of it where it cannot be sent now.
        let key = key.filter(|_| self.is_free(self.worker(index)));
        SharedPrefix {
            tokens,
            key,
            requests: key.map_or(0.0, |key| self.prefixes.requests(key, self.now)),
        }
    }

    fn cached(&self, index: ViewIndex) -> Cached {
        self.prefixes.cached(self.place(index))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::fleet::events::{Endpoint, Events};
    use crate::fleet::health::Health;
    use crate::fleet::registry::tests::{bring_up, facts, member, registry};
    use crate::fleet::speed::Speed;
    use crate::fleet::{Facts, Member, PinnedApi};
    use crate::http::circuit_breaker;
    use crate::ids::Model;
    use crate::observe;
    use crate::relay::prompt::cached_prefix::tests::{caches, prompt};
    use crate::routing::{PrefixCounts, TierCredit};

    const MODEL: &str = "m";

    #[test]
    fn a_prefix_counts_while_one_of_those_that_have_it_takes_requests() {
        let joined = observe::now();
        let now = joined + Duration::from_secs(3_600);
        let prompt = prompt();
        let (credit, counts) = (TierCredit::default(), PrefixCounts::new(joined));
        for why in ["open", "half-open", "paused", "excluded"] {
            // The workers that get no requests.
            for names in [&["a"][..], &["b"][..], &["a", "b"][..]] {
                let (fleet, caches) = (registry(&["a", "b"]), caches(joined));
                bring_up(&fleet, MODEL);
                let snapshot = fleet.snapshot();
                let group = &*snapshot.models[&Model::from(MODEL)];
                let mut excluded = Vec::new();
                for worker in &group.workers {
                    let cached = &prompt.blocks;
                    caches.predicted.record(joined, worker.id, 0, cached);
                    if !names.contains(&&*worker.name) {
                        continue;
                    }
                    match why {
                        "paused" => worker.breaker.pause(now + Duration::from_secs(1)),
                        "excluded" => excluded.push(worker.id),
                        _ => {
                            let failed = if why == "open" { now } else { joined };
                            while worker.breaker.state() == circuit_breaker::State::Closed {
                                worker.breaker.on_failure(failed);
                            }
                            // The trial request is under way from now on.
                            assert_eq!(worker.breaker.admit(now), why == "half-open");
                        }
                    }
                }
                let prefixes =
                    CachedPrefixes::new(group, &caches, &prompt, &credit, (8, 7), &counts);
                let view = FleetView::new(&prefixes, Task::Decode, now, &excluded);
                let shared = view.shared_prefix();
                assert_eq!(shared.tokens, 256);
                assert_eq!(shared.key.is_some(), names.len() == 1, "{names:?} {why}");
            }
        }
    }

    #[test]
    fn workers_that_take_no_requests_are_no_candidates_for_their_adapters() {
        let now = observe::now();
        let (fleet, caches, prompt) = (registry(&["a", "b"]), caches(now), prompt());
        let (credit, counts) = (TierCredit::default(), PrefixCounts::new(now));
        for status in &fleet.snapshot().workers {
            let known = Facts {
                adapters: [Model::from(MODEL)].into(),
                ..facts(&[MODEL])
            };
            fleet.set_facts(status.worker.id, known);
            fleet.set_health(status.worker.id, Health::Up);
            status.worker.adapters.on_used(&Model::from(MODEL));
        }
        let snapshot = fleet.snapshot();
        let group = &*snapshot.models[&Model::from(MODEL)];
        let prefixes = CachedPrefixes::new(group, &caches, &prompt, &credit, (8, 7), &counts);
        let all = FleetView::new(&prefixes, Task::Decode, now, &[]);
        assert_eq!(all.adapter_owners().len(), 2);
        let first = [group.workers[0].id];
        let others = FleetView::new(&prefixes, Task::Decode, now, &first);
        assert_eq!(others.adapter_owners(), [ViewIndex::new(1)]);
        // KV transfers from the first one fail.
        let prefill = Task::Prefill(Connector::Nixl, Api::Chat);
        let transfers = &group.workers[0].kv_transfer_breaker;
        transfers.pause(now + Duration::from_secs(1));
        let legs = FleetView::new(&prefixes, prefill, now, &[]);
        assert_eq!(legs.adapter_owners(), [ViewIndex::new(1)]);
        assert!(!legs.state(ViewIndex::new(0)).is_usable);
        assert!(legs.state(ViewIndex::new(1)).is_usable);
        let decode = FleetView::new(&prefixes, Task::Decode, now, &[]);
        assert_eq!(decode.adapter_owners().len(), 2);
    }

    #[test]
    fn a_backlog_is_that_of_the_state_with_no_more_requests_that_stand_still() {
        let now = observe::now();
        let (fleet, caches, prompt) = (registry(&[]), caches(now), prompt());
        let (credit, counts) = (TierCredit::default(), PrefixCounts::new(now));
        let endpoint = Endpoint::Zmq {
            publisher: "tcp://*:5557".to_owned(),
            replay: None,
            topic: String::new(),
        };
        let with = |name, role, events| Member {
            role,
            events,
            ..member(name)
        };
        let members = vec![
            with("whole", Role::Both, Events::Off),
            with("ranks", Role::Both, Events::At(vec![endpoint; 2])),
            with("prefill", Role::Prefill, Events::Off),
        ];
        fleet.set_members("static", members);
        for status in &fleet.snapshot().workers {
            let known = Facts {
                version: Some("0.32.0".to_owned()),
                ..facts(&[MODEL])
            };
            fleet.set_facts(status.worker.id, known);
            fleet.set_health(status.worker.id, Health::Up);
        }
        let snapshot = fleet.snapshot();
        let group = &*snapshot.models[&Model::from(MODEL)];
        let share = LoadShare {
            requests: 2,
            queued_tokens: 70,
            context_tokens: 90,
        };
        let mut promised = Promised::default();
        for (number, worker) in (1_u32..).zip(&group.workers) {
            worker.load.speed.set(&Speed {
                prompt_token: 1e-4 * f64::from(number),
                overlap: 0.25,
                ..Speed::default()
            });
            // Usually there are eight: more than now, or fewer.
            worker.load.set_peers(20, 0, 0);
            worker.load.see_requests();
            let queued_tokens = 1_000 * u64::from(number);
            worker.load.set_peers(3 * number, queued_tokens, 0);
            worker.pinned.set_peers(2, |rank| LoadShare {
                requests: rank,
                queued_tokens: 100 * u64::from(rank),
                context_tokens: 0,
            });
            let rank = worker.id.cache_owner(Some(1));
            promised.add(&[(worker.id, share), (rank, share)]);
        }
        let prefill = Task::Prefill(Connector::Nixl, Api::Chat);
        for (task, pinned, places) in [
            (Task::Decode, None, 2),
            (Task::Decode, Some(PinnedApi::Chat), 3),
            (prefill, None, 3),
            (prefill, Some(PinnedApi::Chat), 4),
        ] {
            let all = Places::new(group, pinned);
            let prefixes = CachedPrefixes::new(all, &caches, &prompt, &credit, (8, 7), &counts);
            for before in [None, Some(&promised)] {
                let view = FleetView::new(&prefixes, task, now, &[]).behind(before);
                assert_eq!(view.len(), places);
                for index in view.indices() {
                    let (backlog, state) = (view.backlog(index), view.state(index));
                    let place = (&*view.worker(index).name, view.rank(index));
                    assert_eq!(backlog.queued_tokens, state.queued_tokens, "{place:?}");
                    assert_eq!(backlog.prompt_token, state.speed.prompt_token, "{place:?}");
                    let delayed = state.delayed * (1.0 - state.speed.overlap);
                    assert!(backlog.delayed <= delayed, "{place:?} {backlog:?}");
                }
            }
        }
    }
}
