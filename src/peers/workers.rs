//! The fleet's workers by address: what this replica has there, and what the others report.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use rustc_hash::FxHashMap;

use super::frame::framed;
use super::gauges::WorkerLoad;
use super::handshake::InstanceId;
use super::load_table::LoadTable;
use super::numbers::{Numbers, WorkerKey};
use super::routed::{RoutedPrompts, RoutedWorker};
use super::wire;
use super::wire::peer_message::Kind;
use crate::fleet::load::LoadShare;
use crate::fleet::registry::Registry;
use crate::fleet::speed::Speed;
use crate::fleet::waiting::{WaitingAt, WaitingByOwner};
use crate::fleet::{Snapshot, Status, Worker, WorkerState};
use crate::ids::WorkerId;

/// A message of so many has some 30 KB.
const SPEEDS_OF_A_MESSAGE: usize = 500;

/// The workers of the fleet's last snapshot.
#[derive(Debug, Default)]
pub(super) struct Workers {
    snapshot: Arc<Snapshot>,
    by_address: FxHashMap<Arc<str>, Listed>,
    addresses: FxHashMap<WorkerId, Arc<str>>,
    /// What waits in the other replicas, and the first ones in their lines.
    waiting: WaitingByOwner,
    /// What no list of this replica has any more and may still run requests.
    departed: Vec<(Arc<str>, Arc<WorkerState>)>,
}

#[derive(Debug)]
struct Listed {
    worker: Arc<Worker>,
    /// Its dp ranks ([`ranks_of`]).
    ranks: u32,
}

/// A worker's dp ranks, each with a cache of its own; 0 if it has one.
pub(super) fn ranks_of(status: &Status) -> u32 {
    let ranks = status.event_ranks() as u32;
    if ranks > 1 { ranks } else { 0 }
}

impl Workers {
    /// Takes over the fleet's snapshot. False if it is the same.
    pub(super) fn refresh(&mut self, fleet: &Registry) -> bool {
        let snapshot = fleet.snapshot();
        if Arc::ptr_eq(&snapshot, &self.snapshot) {
            return false;
        }
        self.snapshot = snapshot.clone();
        let workers = self.snapshot.workers.iter().map(|status| {
            let worker = &status.worker;
            let listed = Listed {
                worker: worker.clone(),
                ranks: ranks_of(status),
            };
            (Arc::from(worker.pool.address()), listed)
        });
        self.by_address = workers.collect();
        let listed = self.by_address.iter();
        let addresses = listed.map(|(address, listed)| (listed.worker.id, address.clone()));
        self.addresses = addresses.collect();
        self.departed = fleet.departed();
        true
    }

    pub(super) fn is_listed(&self, address: &str) -> bool {
        self.by_address.contains_key(address)
    }

    /// True as long as the others may have to hear of this replica's load there.
    pub(super) fn may_have_load(&self, address: &str) -> bool {
        let mut departed = self.departed.iter();
        self.is_listed(address)
            || departed.any(|(other, state)| **other == *address && is_busy(state))
    }

    /// Gives the dp ranks of workers that have several numbers of their own: routed prompts and loads name them.
    pub(super) fn number_ranks(&self, now: Instant, numbers: &mut Numbers) {
        for (address, listed) in &self.by_address {
            for rank in 0..listed.ranks {
                numbers.number(now, &WorkerKey::rank(address, rank));
            }
        }
    }

    /// What this replica itself has at each worker, and what waits in it for that one, with the first of these; of
    /// both, what is pinned to each of the worker's ranks. Also at workers that left its list and run its requests: the
    /// others may list them.
    pub(super) fn own_loads(
        &self,
        waiting: Option<&WaitingByOwner>,
    ) -> impl Iterator<Item = (WorkerKey, WorkerLoad)> {
        let of_owner = move |owner: WorkerId| {
            let waiting = waiting.and_then(|waiting| waiting.at(owner));
            let parts = waiting.map(|waiting| (waiting.load, waiting.first.first().copied()));
            parts.unwrap_or_default()
        };
        let departed = self.departed.iter().filter(|(_, state)| is_busy(state));
        let departed = departed.map(move |(address, state)| {
            let load = WorkerLoad::of_worker(&state.load, LoadShare::default(), None);
            (WorkerKey::worker(address), load)
        });
        let listed = self.by_address.iter().flat_map(move |(address, listed)| {
            let worker = &listed.worker;
            let (waiting, first) = of_owner(worker.id);
            let whole = WorkerLoad::of_worker(&worker.load, waiting, first);
            let of_rank = move |rank| {
                let (waiting, first) = of_owner(worker.id.cache_owner(Some(rank)));
                let load = WorkerLoad::new(worker.pinned.own(rank), waiting, first);
                (WorkerKey::rank(address, rank), load)
            };
            let ranks = (0..listed.ranks).map(of_rank);
            let busy = ranks.filter(|(_, load)| !load.is_zero());
            let of_worker = (WorkerKey::worker(address), whole);
            std::iter::once(of_worker).chain(busy)
        });
        departed.chain(listed)
    }

    /// Writes what the others have at each worker to where routing reads it.
    pub(super) fn set_all(&mut self, now: Instant, table: &LoadTable, fleet: &Registry) {
        self.waiting = WaitingByOwner::default();
        let addresses: Vec<Arc<str>> = self.by_address.keys().cloned().collect();
        self.set(now, addresses, table, false);
        fleet.waiting().set_peers(self.waiting.clone());
    }

    /// Writes what the others have at each worker where that has changed to where routing reads it. True if it has
    /// changed anywhere. `is_first`: a replica has just connected, whose requests the engines had reported as foreign.
    pub(super) fn set_changed(
        &mut self,
        now: Instant,
        table: &mut LoadTable,
        is_first: bool,
        fleet: &Registry,
    ) -> bool {
        let changed = table.take_changed();
        let is_changed = !changed.is_empty();
        if self.set(now, changed, table, is_first) {
            fleet.waiting().set_peers(self.waiting.clone());
        }
        is_changed
    }

    /// True if what waits in the other replicas has changed.
    fn set(
        &mut self,
        now: Instant,
        addresses: impl IntoIterator<Item = Arc<str>>,
        table: &LoadTable,
        is_first: bool,
    ) -> bool {
        let mut is_changed = false;
        for address in addresses {
            if let Some(listed) = self.by_address.get(&address) {
                listed.set(now, &address, table, is_first);
                is_changed |= listed.set_waiting(&mut self.waiting, &address, table);
            }
        }
        is_changed
    }

    /// What this replica has learnt of how fast the workers are, for a replica that has just connected.
    pub(super) fn learnt_speeds(&self) -> Vec<Bytes> {
        let workers = self.by_address.iter();
        let known = workers.filter(|(_, listed)| listed.worker.speed_samples() > 0);
        let rows = known.map(|(address, Listed { worker, .. })| {
            let speed = worker.load.speed.get();
            wire::LearntSpeed {
                address: address.to_string(),
                prompt_token: speed.prompt_token as f32,
                step: speed.step as f32,
                batch: speed.batch as f32,
                overlap: speed.overlap as f32,
                samples: worker.speed_samples(),
                slots: worker.load.learnt_slots().unwrap_or(0),
            }
        });
        let rows: Vec<wire::LearntSpeed> = rows.collect();
        let message = |workers: &[wire::LearntSpeed]| {
            let workers = workers.to_vec();
            framed(Kind::LearntSpeeds(wire::LearntSpeeds { workers }))
        };
        rows.chunks(SPEEDS_OF_A_MESSAGE).map(message).collect()
    }

    /// Takes over what another replica has learnt, of workers of which this one knows little itself.
    pub(super) fn take_speeds(&self, message: &wire::LearntSpeeds) {
        for row in &message.workers {
            if let Some(Listed { worker, .. }) = self.by_address.get(&*row.address) {
                let speed = Speed {
                    prompt_token: row.prompt_token.into(),
                    step: row.step.into(),
                    batch: row.batch.into(),
                    overlap: f64::from(row.overlap).clamp(0.0, 1.0),
                };
                worker.on_peer_speed(&speed, row.samples, row.slots);
            }
        }
    }

    /// What this replica routed since the last report, for all replicas.
    pub(super) fn routed_message(&self, routed: &RoutedPrompts, known: &Numbers) -> Option<Bytes> {
        let mut numbers: FxHashMap<WorkerId, Option<u32>> = FxHashMap::default();
        let message = routed.take_message(|id| {
            *numbers.entry(id).or_insert_with(|| {
                let address = self.addresses.get(&id.worker())?;
                known.known(&WorkerKey {
                    address: address.clone(),
                    rank: id.rank(),
                })
            })
        })?;
        Some(framed(Kind::Routed(message)))
    }

    /// The workers that a replica's message names, by its numbers.
    pub(super) fn routed_workers(
        &self,
        table: &LoadTable,
        peer: InstanceId,
        message: &wire::RoutedPrompts,
    ) -> FxHashMap<u32, RoutedWorker> {
        let prompts = message.prompts.iter().map(|prompt| prompt.number);
        let unconfirmed = message.unconfirmed.iter().map(|prompt| prompt.number);
        let mut workers = FxHashMap::default();
        for number in prompts.chain(unconfirmed) {
            let Some(key) = table.key(peer, number) else {
                continue;
            };
            if let Some(Listed { worker, .. }) = self.by_address.get(&key.address) {
                workers.entry(number).or_insert(RoutedWorker {
                    id: worker.id.cache_owner(key.rank),
                    cache_tokens: worker.cache_tokens_of(key.rank),
                });
            }
        }
        workers
    }
}

impl Listed {
    fn set(&self, now: Instant, address: &Arc<str>, table: &LoadTable, is_first: bool) {
        let Self { worker, ranks } = self;
        let all = table.sum(&WorkerKey::worker(address));
        let (sum, load) = (all.sent(), &worker.load);
        load.set_peers(sum.requests, sum.queued_tokens, sum.context_tokens);
        load.set_peers_uncomputed_prompts(all.uncomputed_prompts);
        let of_rank = |rank| table.sum(&WorkerKey::rank(address, rank)).sent();
        worker.pinned.set_peers(*ranks, of_rank);
        if is_first {
            load.recount_foreign()
        } else {
            load.recount_new_foreign(now)
        }
    }

    /// True if it has changed.
    fn set_waiting(&self, all: &mut WaitingByOwner, address: &Arc<str>, table: &LoadTable) -> bool {
        let mut is_changed = false;
        for rank in std::iter::once(None).chain((0..self.ranks).map(Some)) {
            let key = WorkerKey {
                address: address.clone(),
                rank,
            };
            let waiting = WaitingAt {
                load: table.sum(&key).waiting,
                first: table.first(&key),
            };
            is_changed |= all.set(self.worker.id.cache_owner(rank), waiting);
        }
        is_changed
    }
}

fn is_busy(state: &WorkerState) -> bool {
    state.load.own_requests() > 0
}
