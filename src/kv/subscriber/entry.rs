//! One rank's entry on the status board: written by its subscriber, read by routing and operators.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use super::rate::Rate;
use super::status::Status;
use crate::kv::event::{Batch, Event};
use crate::kv::index::CopyReport;
use crate::kv::stream::State;
use crate::kv::tokenizer_check::difference::ReportedTokens;
use crate::kv::tree_copies::{NoTree, TreeCopy};
use crate::observe;

/// Parent a prompt's first token, how long the engine's repeated report may take: longer than batches
/// are ever delayed.
const REPEAT_REPORT_WINDOW: Duration = Duration::from_secs(60);

/// What is recorded of a worker whose tokenizer check fails, for each rank.
const MAX_RECORDED_STORES: usize = 16;
const MAX_RECORDED_TOKENS: usize = 4_096;

#[derive(Debug)]
pub(super) struct RankEntry {
    pub(super) rank: u32,
    /// The tree's state; both are false while it is cold or stale.
    pub(super) is_live: AtomicBool,
    created: Instant,
    /// When a batch was last applied to the live tree: one more than the microseconds since `created`; 0 if none was.
    applied_live_us: AtomicU64,
    pub(super) is_partial: AtomicBool,
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
    repeat_reports: Mutex<RepeatReports>,
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

/// Requests that made the engine report cached blocks again.
#[derive(Debug, Default)]
struct RepeatReports {
    /// Such requests whose prompt is not computed yet.
    running: u32,
    /// Until when events may be repeats that earlier such requests caused.
    until: Option<Instant>,
    /// Whether there was any since the tree was last cleared: replayed batches may contain its repeats.
    since_clear: bool,
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
            is_partial: AtomicBool::new(false),
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
            repeat_reports: Mutex::default(),
        }
    }

    pub(super) fn set_state(&self, state: State, is_settled: bool) {
        self.is_settled.store(is_settled, Relaxed);
        self.is_live.store(matches!(state, State::Live), Relaxed);
        self.is_partial
            .store(matches!(state, State::Partial), Relaxed);
    }

    pub(super) fn on_applied_live(&self, now: Instant) {
        let passed = now.saturating_duration_since(self.created).as_micros() as u64;
        self.applied_live_us.store(passed + 1, Relaxed);
    }

    pub(super) fn applied_live(&self) -> Option<Instant> {
        let passed = self.applied_live_us.load(Relaxed).checked_sub(1)?;
        Some(self.created + Duration::from_micros(passed))
    }

    /// The tree was cleared. Repeats that the previous process was asked for no longer matter.
    pub(super) fn on_cleared(&self, now: Instant) {
        self.report.lock().cleared_at = Some(now);
        let mut repeats = self.repeat_reports.lock();
        repeats.since_clear = repeats.running > 0;
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

    /// Whether a store that begins at a prompt's first block is a new copy, or may be a repeated report
    /// of a known one.
    pub(super) fn copies(&self, now: Instant, is_live: bool) -> CopyReport {
        let repeats = self.repeat_reports.lock();
        let is_expected = repeats.running > 0 || repeats.until.is_some_and(|until| now < until);
        if is_expected || repeats.since_clear && !is_live {
            CopyReport::AtLeastOne
        } else {
            CopyReport::OneMore
        }
    }
}

/// A request that makes an engine report the cached blocks of its prompt again. Drop it when the prompt
/// is computed or the request ends.
#[must_use = "dropping it says that the prompt is computed"]
#[derive(Debug)]
pub struct RepeatReport {
    entries: Vec<Arc<RankEntry>>,
}

impl RepeatReport {
    pub(super) fn new(entries: Vec<Arc<RankEntry>>) -> Self {
        for entry in &entries {
            let mut repeats = entry.repeat_reports.lock();
            repeats.running += 1;
            repeats.since_clear = true;
        }
        Self { entries }
    }
}

impl Drop for RepeatReport {
    fn drop(&mut self) {
        let until = observe::now() + REPEAT_REPORT_WINDOW;
        for entry in &self.entries {
            let mut repeats = entry.repeat_reports.lock();
            repeats.running = repeats.running.saturating_sub(1);
            repeats.until = Some(until);
        }
    }
}

/// A request for a copy of one rank's tree, on its way to the subscriber that has the tree.
pub(super) type TreeRequest = oneshot::Sender<Result<TreeCopy, NoTree>>;
