//! One rank's entry on the status board: written by its subscriber, read by routing and operators.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use super::rate::Rate;
use super::status::Status;
use crate::kv::event::{Batch, Event};
use crate::kv::stream::State;
use crate::kv::tokenizer_check::difference::ReportedTokens;
use crate::kv::tree_copies::{NoTree, TreeCopy};

/// What is recorded of a worker whose tokenizer check fails, for each rank.
const MAX_RECORDED_STORES: usize = 16;
const MAX_RECORDED_TOKENS: usize = 4_096;

#[derive(Debug)]
pub(super) struct RankEntry {
    pub(super) rank: u32,
    /// The tree is whole, as far as is known.
    pub(super) is_live: AtomicBool,
    created: Instant,
    /// When a batch was last applied to the live tree: one more than the microseconds since `created`; 0 if none was.
    applied_live_us: AtomicU64,
    /// Its source has been connected at least once.
    pub(super) was_connected: AtomicBool,
    /// Requests were served that must have stored blocks, and no event came since.
    pub(super) is_silent: AtomicBool,
    pub(super) records_stores: AtomicBool,
    /// All is known that is to be known soon: no request for what the rank caches is under way.
    pub(super) is_settled: AtomicBool,
    /// Requests of other replicas for the tree.
    pub(super) tree_requests: mpsc::Sender<TreeRequest>,
    pub(super) report: Mutex<Report>,
}

#[derive(Debug)]
pub(super) struct Report {
    pub(super) status: Status,
    pub(super) state_since: Instant,
    pub(super) events: Rate,
    pub(super) applied_at: Option<Instant>,
    pub(super) cleared_at: Option<Instant>,
    pub(super) recorded_stores: VecDeque<ReportedTokens>,
}

impl RankEntry {
    pub(super) fn new(
        now: Instant,
        status: Status,
        tree_requests: mpsc::Sender<TreeRequest>,
    ) -> Self {
        Self {
            rank: status.rank,
            is_live: AtomicBool::new(false),
            created: now,
            applied_live_us: AtomicU64::new(0),
            was_connected: AtomicBool::new(false),
            is_silent: AtomicBool::new(false),
            records_stores: AtomicBool::new(false),
            is_settled: AtomicBool::new(false),
            tree_requests,
            report: Mutex::new(Report {
                status,
                state_since: now,
                events: Rate::new(now),
                applied_at: None,
                cleared_at: None,
                recorded_stores: VecDeque::new(),
            }),
        }
    }

    pub(super) fn set_state(&self, state: State, is_settled: bool) {
        self.is_settled.store(is_settled, Relaxed);
        self.is_live.store(matches!(state, State::Live), Relaxed);
    }

    pub(super) fn on_applied_live(&self, now: Instant) {
        let passed = now.saturating_duration_since(self.created).as_micros() as u64;
        self.applied_live_us.store(passed + 1, Relaxed);
    }

    pub(super) fn applied_live(&self) -> Option<Instant> {
        let passed = self.applied_live_us.load(Relaxed).checked_sub(1)?;
        Some(self.created + Duration::from_micros(passed))
    }

    pub(super) fn on_cleared(&self, now: Instant) {
        self.report.lock().cleared_at = Some(now);
    }

    /// Records the batch's stored tokens if [`super::StatusBoard::record_stores`] asked for it.
    pub(super) fn record(&self, batch: &Batch) {
        if !self.records_stores.load(Relaxed) {
            return;
        }
        let recorded = &mut self.report.lock().recorded_stores;
        for event in &batch.events {
            let Event::Stored(stored) = event else {
                continue;
            };
            if recorded.len() == MAX_RECORDED_STORES {
                recorded.pop_front();
            }
            let tokens = stored.token_ids.iter().take(MAX_RECORDED_TOKENS);
            recorded.push_back(ReportedTokens {
                is_start: stored.parent.is_none(),
                tokens: tokens.copied().collect(),
            });
        }
    }
}

/// A request for a copy of one rank's tree, on its way to the subscriber that has the tree.
pub(super) type TreeRequest = oneshot::Sender<Result<TreeCopy, NoTree>>;
