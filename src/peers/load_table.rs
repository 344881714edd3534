//! What the other replicas have at each worker: their reports, summed up by worker. Pure.
//!
//! Reports are absolute, so one that is late or doubled changes nothing, and the next one heals what was lost. A replica
//! whose stream ended, or that was silent for too long, no longer counts.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustc_hash::{FxHashMap, FxHashSet};

use super::gauges::{self, WorkerLoad};
use super::handshake::InstanceId;
use super::numbers::WorkerKey;
use super::wire;
use crate::fleet::load::LoadShare;
use crate::fleet::waiting::{self, DueTime, FirstInLine};

/// A report beyond these is a mistake of the other replica; so cut, no sum overflows.
const MAX_REQUESTS: u32 = 1 << 20;
const MAX_TOKENS: u64 = 1 << 36;
/// Longer than any `host:port`.
const MAX_ADDRESS: usize = 300;

#[derive(Debug)]
pub struct LoadTable {
    peers: BTreeMap<InstanceId, PeerLoad>,
    /// Of workers, and of what is pinned to single ranks of them.
    sums: FxHashMap<WorkerKey, WorkerLoad>,
    /// When the first one in the line of each replica is due.
    first: FxHashMap<WorkerKey, BTreeMap<InstanceId, DueTime>>,
    /// Workers whose sums changed since they were taken.
    changed: FxHashSet<Arc<str>>,
    max_workers: usize,
}

#[derive(Debug, Default)]
struct PeerLoad {
    /// By the replica's numbers.
    workers: FxHashMap<u32, Entry>,
    by_address: FxHashMap<Arc<str>, AtWorker>,
    /// Of the last report; `None` before the first whole one.
    sequence: Option<u64>,
    /// From the last report: how long before it the oldest change in it had happened.
    age: Duration,
}

#[derive(Debug)]
struct Entry {
    key: WorkerKey,
    load: WorkerLoad,
}

/// One replica's load at one worker.
#[derive(Clone, Copy, Debug, Default)]
struct AtWorker {
    /// Reported for all ranks together.
    together: WorkerLoad,
    /// The sum of what was reported for single ranks.
    by_rank: WorkerLoad,
}

impl AtWorker {
    /// A replica that reports both reports the same requests twice.
    fn load(&self) -> WorkerLoad {
        if self.together.is_zero() {
            self.by_rank
        } else {
            self.together
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// The first report of a stream.
    pub is_first: bool,
    /// Names or loads beyond the limits, or without a name.
    pub ignored: u32,
}

impl LoadTable {
    pub fn new(max_workers: usize) -> Self {
        Self {
            peers: BTreeMap::new(),
            sums: FxHashMap::default(),
            first: FxHashMap::default(),
            changed: FxHashSet::default(),
            max_workers,
        }
    }

    /// A new stream of a replica: its numbers and sequence numbers begin anew. What it had reported before counts until
    /// the first report on this stream.
    pub fn on_stream(&mut self, peer: InstanceId) {
        self.peers.entry(peer).or_default().sequence = None;
    }

    /// Whether a replica's first report on its stream has come.
    pub fn has_reported(&self, peer: InstanceId) -> bool {
        let load = self.peers.get(&peer);
        load.is_some_and(|load| load.sequence.is_some())
    }

    pub fn on_names(&mut self, peer: InstanceId, names: &wire::WorkerNames) -> Applied {
        let mut applied = Applied::default();
        for name in &names.workers {
            let load = self.peers.entry(peer).or_default();
            let key = WorkerKey {
                address: name.address.as_str().into(),
                rank: name.rank,
            };
            if name.address.len() > MAX_ADDRESS {
                applied.ignored += 1;
                continue;
            }
            match load.workers.get(&name.number) {
                Some(entry) if entry.key == key => continue,
                Some(_) => {
                    // The number's former worker has left the sender's fleet.
                    self.set(peer, name.number, WorkerLoad::default());
                }
                None if load.workers.len() >= self.max_workers => {
                    applied.ignored += 1;
                    continue;
                }
                None => {}
            }
            let entry = Entry {
                key,
                load: WorkerLoad::default(),
            };
            let load = self.peers.entry(peer).or_default();
            load.workers.insert(name.number, entry);
        }
        applied
    }

    pub fn on_report(
        &mut self,
        now: Instant,
        peer: InstanceId,
        report: &wire::LoadReport,
    ) -> Applied {
        let mut applied = Applied::default();
        let load = self.peers.entry(peer).or_default();
        let is_next = match load.sequence {
            Some(last) => report.sequence > last || (report.is_whole && report.sequence == last),
            None => report.is_whole,
        };
        if !is_next {
            return applied;
        }
        applied.is_first = load.sequence.replace(report.sequence).is_none();
        load.age = Duration::from_micros(report.age_us.into());
        let left_out: Vec<u32> = if report.is_whole {
            let listed: FxHashSet<u32> = report.workers.iter().map(|row| row.number).collect();
            let workers = load.workers.iter();
            let busy = workers.filter(|(_, entry)| !entry.load.is_zero());
            let numbers = busy.map(|(number, _)| *number);
            numbers.filter(|number| !listed.contains(number)).collect()
        } else {
            Vec::new()
        };
        // First these: a worker that came again has two numbers.
        for number in left_out {
            self.set(peer, number, WorkerLoad::default());
        }
        for worker in &report.workers {
            let first = worker.first_due_ms.map(|ms| DueTime {
                priority: worker.first_priority,
                at: gauges::after_ms(now, ms),
            });
            let reported = WorkerLoad {
                first,
                requests: worker.requests.min(MAX_REQUESTS).into(),
                queued_tokens: worker.queued_tokens.min(MAX_TOKENS),
                context_tokens: worker.context_tokens.min(MAX_TOKENS),
                waiting: LoadShare {
                    requests: worker.waiting_requests.min(MAX_REQUESTS),
                    queued_tokens: worker.waiting_queued_tokens.min(MAX_TOKENS),
                    context_tokens: worker.waiting_context_tokens.min(MAX_TOKENS),
                },
                uncomputed_prompts: worker.uncomputed_prompts.min(MAX_TOKENS),
            };
            if !self.set(peer, worker.number, reported) {
                applied.ignored += 1;
            }
        }
        applied
    }

    /// The replica's load no longer counts.
    pub fn remove(&mut self, peer: InstanceId) {
        let Some(load) = self.peers.remove(&peer) else {
            return;
        };
        for entry in load.workers.values() {
            self.set_first(peer, &entry.key, None);
            if entry.key.rank.is_some() {
                self.replace(&entry.key, entry.load, WorkerLoad::default());
            }
        }
        for (address, at_worker) in load.by_address {
            let key = WorkerKey::worker(&address);
            self.replace(&key, at_worker.load(), WorkerLoad::default());
        }
    }

    /// The workers whose sums, or those of whose ranks, changed since the last call.
    pub fn take_changed(&mut self) -> FxHashSet<Arc<str>> {
        std::mem::take(&mut self.changed)
    }

    /// What all other replicas together have at a worker, or have pinned to a rank of it.
    pub fn sum(&self, key: &WorkerKey) -> WorkerLoad {
        self.sums.get(key).copied().unwrap_or_default()
    }

    /// When the first ones in the lines of all other replicas are due, for each priority the earliest.
    pub fn first(&self, key: &WorkerKey) -> FirstInLine {
        let of_replicas = self.first.get(key).into_iter().flat_map(BTreeMap::values);
        waiting::earliest(of_replicas.copied())
    }

    pub fn load(&self, peer: InstanceId, address: &str) -> WorkerLoad {
        let load = self.peers.get(&peer);
        let at_worker = load.and_then(|load| load.by_address.get(address));
        at_worker.map_or_else(WorkerLoad::default, AtWorker::load)
    }

    /// The worker, or rank, that a replica means by a number.
    pub fn key(&self, peer: InstanceId, number: u32) -> Option<&WorkerKey> {
        Some(&self.peers.get(&peer)?.workers.get(&number)?.key)
    }

    /// How long before the last report the oldest change in it had happened.
    pub fn age(&self, peer: InstanceId) -> Duration {
        self.peers
            .get(&peer)
            .map_or(Duration::ZERO, |load| load.age)
    }

    /// Workers that a replica reports and `is_listed` does not know.
    pub fn unknown_workers(&self, peer: InstanceId, is_listed: impl Fn(&str) -> bool) -> usize {
        let load = self.peers.get(&peer);
        let addresses = load.into_iter().flat_map(|load| load.workers.values());
        let unknown = addresses.filter(|entry| !is_listed(&entry.key.address));
        unknown.count()
    }

    /// Entries of all maps.
    #[cfg(test)]
    pub(super) fn entries(&self) -> usize {
        let of_peer = |load: &PeerLoad| load.workers.len() + load.by_address.len();
        let of_peers: usize = self.peers.values().map(of_peer).sum();
        let first: usize = self.first.values().map(BTreeMap::len).sum();
        self.peers.len() + of_peers + self.sums.len() + first + self.changed.len()
    }

    /// False if the replica has not named the number.
    fn set(&mut self, peer: InstanceId, number: u32, mut new: WorkerLoad) -> bool {
        let Some(load) = self.peers.get_mut(&peer) else {
            return false;
        };
        let Some(entry) = load.workers.get_mut(&number) else {
            return false;
        };
        new.first = new.first.map(|first| match entry.load.first {
            // It is the same one, or another one that seems to be due a little later than it is, but never earlier.
            Some(known) if known.is_about(first) && known.at > first.at => known,
            _ => first,
        });
        let old = std::mem::replace(&mut entry.load, new);
        if old == new {
            return true;
        }
        let key = entry.key.clone();
        let at_worker = load.by_address.entry(key.address.clone()).or_default();
        let before = at_worker.load();
        match key.rank {
            None => at_worker.together = new,
            Some(_) => at_worker.by_rank = exchange(at_worker.by_rank, old, new),
        }
        let after = at_worker.load();
        if at_worker.together.is_zero() && at_worker.by_rank.is_zero() {
            load.by_address.remove(&key.address);
        }
        if old.first != new.first {
            self.set_first(peer, &key, new.first);
        }
        if key.rank.is_some() {
            self.replace(&key, old, new);
        }
        self.replace(&WorkerKey::worker(&key.address), before, after);
        true
    }

    fn set_first(&mut self, peer: InstanceId, key: &WorkerKey, first: Option<DueTime>) {
        if let Some(first) = first {
            let of_key = self.first.entry(key.clone()).or_default();
            of_key.insert(peer, first);
        } else if let Some(of_key) = self.first.get_mut(key) {
            of_key.remove(&peer);
            if of_key.is_empty() {
                self.first.remove(key);
            }
        }
    }

    /// Puts `after` in the place of `before`, which is part of the key's sum.
    fn replace(&mut self, key: &WorkerKey, before: WorkerLoad, after: WorkerLoad) {
        if before == after {
            return;
        }
        let sum = self.sums.entry(key.clone()).or_default();
        *sum = exchange(*sum, before, after);
        if sum.is_zero() {
            self.sums.remove(key);
        }
        self.changed.insert(key.address.clone());
    }
}

/// `sum` with `new` in place of `old`, which is part of it.
fn exchange(sum: WorkerLoad, old: WorkerLoad, new: WorkerLoad) -> WorkerLoad {
    WorkerLoad {
        requests: sum.requests - old.requests + new.requests,
        queued_tokens: sum.queued_tokens - old.queued_tokens + new.queued_tokens,
        context_tokens: sum.context_tokens - old.context_tokens + new.context_tokens,
        waiting: sum.waiting.minus(old.waiting).plus(new.waiting),
        uncomputed_prompts: sum.uncomputed_prompts - old.uncomputed_prompts
            + new.uncomputed_prompts,
        first: None,
    }
}

#[cfg(test)]
mod tests;
