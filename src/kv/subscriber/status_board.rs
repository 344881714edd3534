//! The status of every rank's subscriber, for routing and for operators.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use arc_swap::{ArcSwap, Guard};
use rustc_hash::FxHashMap;
use tokio::sync::{mpsc, oneshot};

use super::entry::{RankEntry, Report, TreeRequest};
use super::status::{Status, TreeState};
use crate::ids::WorkerId;
use crate::kv::stream::State;
use crate::kv::tokenizer_check::difference::ReportedTokens;
use crate::kv::tree_copies::{NoTree, TreeCopy};

type Entries = FxHashMap<WorkerId, Vec<Arc<RankEntry>>>;

/// The reason of a tree's state while the worker's cache is predicted because no event comes.
const SILENT: &str = "silent";

/// Maps that workers are spread over: so many times fewer entries are copied when a subscriber starts or ends.
const SHARDS: usize = 128;

#[derive(Debug)]
pub struct StatusBoard {
    /// One is replaced when a subscriber starts or ends, so that readers take no lock.
    shards: [ArcSwap<Entries>; SHARDS],
    /// Subscribers whose source has never been connected.
    never_connected: AtomicU32,
    /// Subscribers of workers whose events are silent.
    silent: AtomicU32,
}

impl Default for StatusBoard {
    fn default() -> Self {
        Self {
            shards: std::array::from_fn(|_| ArcSwap::default()),
            never_connected: AtomicU32::new(0),
            silent: AtomicU32::new(0),
        }
    }
}

/// The board as one request sees it.
#[derive(Debug)]
pub struct StatusSnapshot<'a> {
    board: &'a StatusBoard,
    /// Whether every worker reports its events; then [`Self::reports`] need not be called for each.
    pub all_report: bool,
}

impl StatusSnapshot<'_> {
    /// Whether all `ranks` of a worker have been connected at least once, and are not silent. A worker that advertises
    /// an unreachable endpoint has no usable events.
    pub fn reports(&self, worker: WorkerId, ranks: u32) -> bool {
        self.board
            .of(worker)
            .get(&worker)
            .is_some_and(|entries| entries.len() >= ranks as usize && entries.iter().all(is_usable))
    }

    /// Whether one rank of a worker has been connected at least once, and is not silent.
    pub fn rank_reports(&self, worker: WorkerId, rank: u32) -> bool {
        let entries = self.board.of(worker);
        let entries = entries.get(&worker);
        entries.is_some_and(|entries| {
            entries
                .iter()
                .any(|entry| entry.rank == rank && is_usable(entry))
        })
    }
}

fn is_usable(rank: &Arc<RankEntry>) -> bool {
    rank.was_connected.load(Relaxed) && !rank.is_silent.load(Relaxed)
}

/// What is known of a worker's cache, all of its ranks together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerCache {
    /// The trees of all ranks are live.
    pub is_live: bool,
    /// Blocks ever removed, and cached now; up to a moment old.
    pub removed_blocks: u64,
    pub blocks: u64,
    /// When the last batch of any rank was applied.
    pub applied_at: Option<Instant>,
    /// When the tree of any rank was last cleared.
    pub cleared_at: Option<Instant>,
}

impl StatusBoard {
    /// Whether a worker's events are followed, in whatever state.
    pub fn has_events(&self, worker: WorkerId) -> bool {
        self.of(worker).contains_key(&worker)
    }

    pub fn snapshot(&self) -> StatusSnapshot<'_> {
        StatusSnapshot {
            all_report: self.never_connected.load(Relaxed) == 0 && self.silent.load(Relaxed) == 0,
            board: self,
        }
    }

    /// Marks a worker's events as silent, until the next event. Returns false if they are already.
    pub fn set_silent(&self, worker: WorkerId) -> bool {
        let mut is_new = false;
        for rank in &self.ranks(worker) {
            if !rank.is_silent.swap(true, Relaxed) {
                self.silent.fetch_add(1, Relaxed);
                is_new = true;
            }
        }
        is_new
    }

    /// Ranks of workers whose events are silent.
    pub fn silent_ranks(&self) -> u32 {
        self.silent.load(Relaxed)
    }

    /// `None` unless all `ranks` of the worker have a subscriber.
    pub fn worker_cache(&self, worker: WorkerId, ranks: u32) -> Option<WorkerCache> {
        let entries = self.of(worker);
        let entries = entries.get(&worker)?;
        if entries.len() < ranks as usize {
            return None;
        }
        let mut cache = WorkerCache {
            is_live: true,
            removed_blocks: 0,
            blocks: 0,
            applied_at: None,
            cleared_at: None,
        };
        for rank in entries {
            cache.is_live &= rank.is_live.load(Relaxed);
            let report = rank.report.lock();
            cache.removed_blocks += report.status.removed_blocks;
            cache.blocks += report.status.blocks.values().sum::<u64>();
            cache.applied_at = cache.applied_at.max(report.applied_at);
            cache.cleared_at = cache.cleared_at.max(report.cleared_at);
        }
        Some(cache)
    }

    /// When a batch was last applied to the tree of a rank, or of a worker's only one, while that tree was live: what was
    /// missed is replayed before.
    pub fn applied_at(&self, of: WorkerId) -> Option<Instant> {
        let entries = self.of(of.worker());
        let entries = entries.get(&of.worker())?;
        match of.rank() {
            Some(rank) => entries
                .iter()
                .find(|entry| entry.rank == rank)?
                .applied_live(),
            None if entries.len() == 1 => entries[0].applied_live(),
            None => None,
        }
    }

    /// The tree state of each of a worker's ranks.
    pub fn trees(&self, now: Instant, worker: WorkerId) -> Vec<TreeState> {
        let tree = |entry: &Arc<RankEntry>| {
            let report = entry.report.lock();
            let age = now.saturating_duration_since(report.state_since);
            TreeState {
                rank: report.status.rank,
                state: report.status.state,
                reason: if entry.is_silent.load(Relaxed) {
                    SILENT
                } else {
                    report.status.reason
                },
                state_age_s: age.as_secs_f64(),
            }
        };
        let mut trees: Vec<TreeState> = self.ranks(worker).iter().map(tree).collect();
        trees.sort_by_key(|tree| tree.rank);
        trees
    }

    /// A copy of a rank's tree, for another replica.
    pub async fn copy_tree(
        &self,
        worker: WorkerId,
        rank: u32,
        model: &str,
    ) -> Result<TreeCopy, NoTree> {
        let ranks = self.ranks(worker);
        let mut ranks = ranks.iter();
        let entry = ranks.find(|entry| {
            let status = &entry.report.lock().status;
            status.rank == rank && status.model == model
        });
        let entry = entry.ok_or(NoTree::UnknownRank)?;
        let (request, answer) = oneshot::channel();
        entry
            .tree_requests
            .try_send(request)
            .map_err(|_| NoTree::Busy)?;
        // The subscriber may end meanwhile.
        answer.await.unwrap_or(Err(NoTree::UnknownRank))
    }

    /// Since when a rank's tree does not count because the engine's process must be verified first. `None` for a tree
    /// that counts, or is empty.
    pub fn stale_since(&self, worker: WorkerId, rank: u32) -> Option<Instant> {
        let entries = self.of(worker);
        let mut ranks = entries.get(&worker)?.iter();
        let entry = ranks.find(|entry| entry.rank == rank)?;
        let report = entry.report.lock();
        let since = report.state_since;
        (report.status.state == State::Stale { since }.as_str()).then_some(since)
    }

    /// How many ranks of the `wanted` workers have a subscriber, and of how many all is known that is to be known
    /// soon.
    pub fn settled(&self, wanted: impl Fn(WorkerId) -> bool) -> (usize, usize) {
        let (mut ranks, mut settled) = (0, 0);
        for shard in &self.shards {
            for (_, entries) in shard.load().iter().filter(|(worker, _)| wanted(**worker)) {
                ranks += entries.len();
                let is_settled = |rank: &&Arc<RankEntry>| rank.is_settled.load(Relaxed);
                settled += entries.iter().filter(is_settled).count();
            }
        }
        (ranks, settled)
    }

    /// Starts recording the tokens that a worker reports as stored, or stops and drops the record.
    pub fn record_stores(&self, worker: WorkerId, enabled: bool) {
        for rank in &self.ranks(worker) {
            if rank.records_stores.swap(enabled, Relaxed) && !enabled {
                rank.report.lock().recorded_stores = VecDeque::new();
            }
        }
    }

    pub fn recorded_stores(&self, worker: WorkerId) -> Vec<ReportedTokens> {
        let recorded =
            |rank: &Arc<RankEntry>| Vec::from(rank.report.lock().recorded_stores.clone());
        self.ranks(worker).iter().flat_map(recorded).collect()
    }

    /// Every rank's status, by worker and rank.
    pub fn statuses(&self, now: Instant) -> Vec<Status> {
        let status = |entry: &Arc<RankEntry>| {
            let report = &mut *entry.report.lock();
            let mut status = report.status.clone();
            let age = now.saturating_duration_since(report.state_since);
            status.state_age_s = age.as_secs_f64();
            if entry.is_silent.load(Relaxed) {
                status.reason = SILENT;
            }
            status.events_per_second = report.events.per_second(now);
            status
        };
        let mut statuses: Vec<Status> = self.all().iter().map(status).collect();
        statuses.sort_by(|a, b| (&a.worker, a.rank).cmp(&(&b.worker, b.rank)));
        statuses
    }

    fn ranks(&self, worker: WorkerId) -> Vec<Arc<RankEntry>> {
        self.of(worker).get(&worker).cloned().unwrap_or_default()
    }

    fn all(&self) -> Vec<Arc<RankEntry>> {
        let shards = self.shards.iter().map(ArcSwap::load);
        let ranks = shards.map(|entries| entries.values().flatten().cloned().collect::<Vec<_>>());
        ranks.flatten().collect()
    }

    fn shard(&self, worker: WorkerId) -> &ArcSwap<Entries> {
        &self.shards[worker.0 as usize % SHARDS]
    }

    fn of(&self, worker: WorkerId) -> Guard<Arc<Entries>> {
        self.shard(worker).load()
    }

    /// A rank of which nothing is known yet has a subscriber until the returned value is dropped.
    #[cfg(test)]
    pub(crate) fn begin_rank(self: &Arc<Self>, worker: WorkerId, rank: u32) -> impl Sized + use<> {
        let status = Status {
            rank,
            ..Status::default()
        };
        let (requests, _) = mpsc::channel(1);
        self.register(crate::observe::now(), worker, status, requests)
    }

    pub(super) fn register(
        self: &Arc<Self>,
        now: Instant,
        worker: WorkerId,
        status: Status,
        requests: mpsc::Sender<TreeRequest>,
    ) -> RankStatus {
        let entry = Arc::new(RankEntry::new(now, status, requests));
        self.never_connected.fetch_add(1, Relaxed);
        self.shard(worker).rcu(|entries| {
            let mut entries = Entries::clone(entries);
            entries.entry(worker).or_default().push(entry.clone());
            entries
        });
        RankStatus {
            board: self.clone(),
            worker,
            entry,
        }
    }
}

/// A subscriber's entry on the board, for as long as the subscriber runs.
#[must_use = "dropping it removes the status from the board"]
#[derive(Debug)]
pub(super) struct RankStatus {
    board: Arc<StatusBoard>,
    worker: WorkerId,
    entry: Arc<RankEntry>,
}

impl RankStatus {
    pub(super) fn update(&self, change: impl FnOnce(&mut Report)) {
        change(&mut self.entry.report.lock());
    }

    pub(super) fn set_connected(&self) {
        if !self.entry.was_connected.swap(true, Relaxed) {
            self.board.never_connected.fetch_sub(1, Relaxed);
        }
    }

    /// A batch came. Returns whether the worker's events were silent until now.
    pub(super) fn end_silence(&self) -> bool {
        if !self.entry.is_silent.load(Relaxed) {
            return false;
        }
        for rank in &self.board.ranks(self.worker) {
            if rank.is_silent.swap(false, Relaxed) {
                self.board.silent.fetch_sub(1, Relaxed);
            }
        }
        true
    }

    pub(super) fn entry(&self) -> &RankEntry {
        &self.entry
    }
}

impl Drop for RankStatus {
    fn drop(&mut self) {
        if !self.entry.was_connected.load(Relaxed) {
            self.board.never_connected.fetch_sub(1, Relaxed);
        }
        if self.entry.is_silent.swap(false, Relaxed) {
            self.board.silent.fetch_sub(1, Relaxed);
        }
        self.board.shard(self.worker).rcu(|entries| {
            let mut entries = Entries::clone(entries);
            if let Some(ranks) = entries.get_mut(&self.worker) {
                ranks.retain(|entry| !Arc::ptr_eq(entry, &self.entry));
                if ranks.is_empty() {
                    entries.remove(&self.worker);
                }
            }
            entries
        });
    }
}
