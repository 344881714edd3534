//! The fleet's workers by address: what this replica has there, and what the others report.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use bytes::Bytes;
use rustc_hash::FxHashMap;

use super::gauges::WorkerLoad;
use super::handshake::InstanceId;
use super::load_table::LoadTable;
use super::message::framed;
use super::numbers::{Numbers, WorkerKey};
use super::routed::{RoutedPrompts, RoutedWorker};
use super::wire;
use super::wire::peer_message::Kind;
use crate::fleet::registry::Registry;
use crate::fleet::{Snapshot, Worker};
use crate::ids::WorkerId;

/// The workers of the fleet's last snapshot.
#[derive(Debug, Default)]
pub(super) struct Workers {
    snapshot: Arc<Snapshot>,
    by_address: FxHashMap<Arc<str>, Arc<Worker>>,
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
            (Arc::from(worker.pool.address()), worker.clone())
        });
        self.by_address = workers.collect();
        true
    }

    pub(super) fn is_listed(&self, address: &str) -> bool {
        self.by_address.contains_key(address)
    }

    /// Gives the dp ranks of workers that have several numbers of their own: routed prompts name them.
    pub(super) fn number_ranks(&self, now: Instant, numbers: &mut Numbers) {
        for status in &self.snapshot.workers {
            let ranks = status.event_endpoints().len() as u32;
            for rank in (0..ranks).filter(|_| ranks > 1) {
                let address = status.worker.pool.address().into();
                let rank = Some(rank);
                numbers.number(now, &WorkerKey { address, rank });
            }
        }
    }

    /// What this replica itself has at each worker.
    pub(super) fn own_loads(&self) -> impl Iterator<Item = (&Arc<str>, WorkerLoad)> {
        self.by_address.iter().map(|(address, worker)| {
            let load = WorkerLoad {
                requests: worker.load.own_requests().into(),
                queued_tokens: worker.load.own_queued_tokens(),
                decode_tokens: worker.load.own_decode_tokens(),
            };
            (address, load)
        })
    }

    /// Writes what the others have at each worker to where routing reads it.
    pub(super) fn set_all(&self, now: Instant, table: &LoadTable) {
        for address in self.by_address.keys() {
            self.set(now, address, table.sum(address), false);
        }
    }

    /// The same for one worker. `is_first`: a replica has just connected, whose requests the engines had reported as
    /// foreign.
    pub(super) fn set(&self, now: Instant, address: &str, sum: WorkerLoad, is_first: bool) {
        let Some(worker) = self.by_address.get(address) else {
            return;
        };
        let requests = u32::try_from(sum.requests).unwrap_or(u32::MAX);
        let load = &worker.load;
        load.set_peers(requests, sum.queued_tokens, sum.decode_tokens);
        match is_first {
            true => load.recount_foreign(),
            false => load.recount_new_foreign(now),
        }
    }

    /// What this replica routed since the last report, for all replicas.
    pub(super) fn routed_message(&self, routed: &RoutedPrompts, known: &Numbers) -> Option<Bytes> {
        let mut numbers: FxHashMap<WorkerId, Option<u32>> = FxHashMap::default();
        let message = routed.take_message(|id| {
            *numbers.entry(id).or_insert_with(|| {
                let mut workers = self.by_address.iter();
                let (address, _) = workers.find(|(_, worker)| worker.id == id.worker())?;
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
            if let Some(worker) = self.by_address.get(&key.address) {
                workers.entry(number).or_insert(RoutedWorker {
                    id: worker.id.cache_owner(key.rank),
                    cache_tokens: worker.cache_tokens.load(Relaxed),
                });
            }
        }
        workers
    }
}
