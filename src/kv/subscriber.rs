//! The task that follows one rank's KV events: source -> stream machine -> tree. It makes no decisions of
//! its own.
//!
//! The task ends when its future is dropped; its tree, its status entry and its metrics go with it.

mod apply;
mod batch_effect;
mod entry;
mod group_copies;
mod join;
pub mod joins;
mod kept_removals;
mod metrics;
mod named_rank;
mod page_events;
mod peer_trees;
mod rate;
mod report;
mod status;
mod status_board;
mod subject;
mod take_over;
mod tree_target;

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tracing::{debug, warn};

use super::event::Batch;
use super::event_filter::TreeImpact;
use super::source::{Source, SourceEvent};
use super::stream::{EventStream, ResyncReason, State, Step, Steps};
use super::tree_copies::{FetchedTree, TreeSource};
use crate::observe;
use crate::observe::log_once::LogOnce;
use apply::RankTree;
use batch_effect::BatchEffect;
use entry::TreeRequest;
use joins::{Joining, Joins, QueuedBytes};
use metrics::Meters;
pub use metrics::Metrics;
use peer_trees::{MAX_TREE_REQUESTS, PeerTrees};
pub use status::{Status, TreeState};
use status_board::RankStatus;
pub use status_board::{StatusBoard, StatusSnapshot, WorkerCache};
pub use subject::{OnCacheLost, Shared, Subject};

/// Blocks applied before the task yields its thread: about a tenth of a millisecond of work.
const BLOCKS_PER_TURN: u64 = 1_024;
/// Pages that are copied or moved before the task yields its thread: as much work as that many blocks.
const PAGES_PER_TURN: usize = 2_048;
/// Inputs taken in a row before the task yields and checks its timers.
const INPUTS_PER_TURN: u32 = 64;
/// Upper bound on the age of the status board's figures.
const REPORT_INTERVAL: Duration = Duration::from_millis(250);
/// How often a live tree is checked for blocks that the index evicted to stay within its memory bound.
/// Other workers' stores cause that, and it raises no event here.
const EVICTION_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Follows a rank's events for as long as the future is polled. `restarts` changes when the worker was
/// down or its process is seen to be new.
pub async fn run(
    mut source: impl Source,
    subject: Subject,
    shared: Shared,
    mut restarts: watch::Receiver<u64>,
) {
    let mut task = Task::new(observe::now(), subject, shared);
    let mut is_watched = true;
    restarts.mark_unchanged();
    loop {
        let sleep = observe::sleep_until(task.next_wake());
        let input = tokio::select! {
            biased;
            changed = restarts.changed(), if is_watched => {
                is_watched = changed.is_ok();
                is_watched.then_some(Input::RestartSignal)
            }
            // Before the timer: if this process was paused, events that arrived meanwhile come first.
            (joining, incarnation) = finished(&mut task.waiting) => {
                Some(Input::Join(joining, incarnation))
            }
            // What has connected and waits is not read: its batches stay with the engine.
            event = source.next(), if task.waiting.is_none() => Some(Input::Source(event)),
            fetched = finished(&mut task.fetching) => Some(Input::PeerTree(fetched.map(Box::new))),
            Some(wanted) = task.copies.recv() => Some(Input::CopyTree(wanted)),
            () = sleep => Some(Input::Timer),
        };
        let now = observe::now();
        if let Some(input) = input {
            task.handle(now, input, &mut source).await;
        }
        task.yield_when_due(now, &mut source).await;
    }
}

/// What is waited for beside the source.
type Pending<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The result of what is waited for; pending for ever if nothing is.
async fn finished<T>(pending: &mut Option<Pending<T>>) -> T {
    let Some(future) = pending else {
        return std::future::pending().await;
    };
    let result = future.await;
    *pending = None;
    result
}

enum Input {
    Source(SourceEvent),
    /// The rank may join now.
    Join(Joining, Option<String>),
    /// The health checks saw the worker go down or its process restart.
    RestartSignal,
    Timer,
    /// What other replicas had.
    PeerTree(Option<Box<FetchedTree>>),
    /// Another replica wants this tree.
    CopyTree(TreeRequest),
}

struct Task {
    subject: Subject,
    stream: EventStream<Batch>,
    tree: RankTree,
    status: RankStatus,
    meters: Meters,
    on_cache_lost: OnCacheLost,
    trees: Option<Arc<dyn TreeSource>>,
    joins: Joins,
    /// A connection that waits for its permit to join, with the incarnation that the source named.
    waiting: Option<Pending<(Joining, Option<String>)>>,
    /// While the engine replays what it keeps.
    joining: Option<Joining>,
    queued: QueuedBytes,
    /// Requests of other replicas for this tree.
    copies: mpsc::Receiver<TreeRequest>,
    /// What other replicas have, once they have answered.
    fetching: Option<Pending<Option<FetchedTree>>>,
    peer_trees: PeerTrees,
    /// Where the tree is from, as last reported.
    origin: String,
    state: State,
    state_since: Instant,
    /// Since when the status board is out of date.
    unreported_since: Option<Instant>,
    eviction_checked_at: Instant,
    replay_log: LogOnce,
    disconnect_log: LogOnce,
    decode_log: LogOnce,
    blocks_this_turn: u64,
    inputs_this_turn: u32,
}

impl Task {
    fn new(now: Instant, subject: Subject, shared: Shared) -> Self {
        let meters = shared.metrics.of(&subject.name, subject.rank);
        let (requests, copies) = mpsc::channel(MAX_TREE_REQUESTS);
        let status = shared.board.register(
            now,
            subject.worker,
            Status::new(
                subject.name.to_string(),
                subject.rank,
                subject.model.to_string(),
            ),
            requests,
        );
        let mut stream = EventStream::new(shared.settings, now);
        if let Some(trees) = &shared.trees {
            stream = stream.with_peer_trees(trees.timeout());
        }
        let task = Self {
            tree: RankTree::new(shared.indexes, &subject),
            subject,
            stream,
            status,
            meters,
            on_cache_lost: shared.on_cache_lost,
            trees: shared.trees,
            queued: shared.joins.queue(),
            joins: shared.joins,
            waiting: None,
            joining: None,
            copies,
            fetching: None,
            peer_trees: PeerTrees::default(),
            origin: String::new(),
            state: State::Cold,
            state_since: now,
            unreported_since: None,
            eviction_checked_at: now,
            replay_log: LogOnce::default(),
            disconnect_log: LogOnce::default(),
            decode_log: LogOnce::default(),
            blocks_this_turn: 0,
            inputs_this_turn: 0,
        };
        task.meters.state(task.state.as_str());
        task.meters.last_sequence(None);
        task
    }

    fn next_wake(&self) -> Option<Instant> {
        let report = self.unreported_since.map(|since| since + REPORT_INTERVAL);
        let is_live = self.state == State::Live;
        let eviction_check = is_live.then(|| self.eviction_checked_at + EVICTION_CHECK_INTERVAL);
        [self.stream.next_timeout(), report, eviction_check]
            .into_iter()
            .flatten()
            .min()
    }

    async fn handle(&mut self, now: Instant, input: Input, source: &mut impl Source) {
        let is_timer = matches!(input, Input::Timer);
        let steps = match input {
            Input::Source(event) => self.on_source_event(now, event, source.can_replay()),
            Input::Join(joining, incarnation) => self.join(now, joining, incarnation.as_deref()),
            Input::RestartSignal => self.stream.on_restart_signal(now),
            Input::Timer => {
                self.check_eviction(now);
                self.stream.on_timeout(now)
            }
            Input::PeerTree(fetched) => self.on_peer_tree(now, fetched.map(|tree| *tree)),
            Input::CopyTree(request) => {
                // Whoever asked may be gone.
                let _ = request.send(self.copy_tree().await);
                Steps::new()
            }
        };
        if !is_timer || !steps.is_empty() {
            self.unreported_since.get_or_insert(now);
        }
        self.carry_out(steps, source).await;
        self.note_join(now);
        self.report(now);
    }

    fn on_source_event(
        &mut self,
        now: Instant,
        event: SourceEvent,
        can_replay: bool,
    ) -> Steps<Batch> {
        let (worker, rank) = (&self.subject.name, self.subject.rank);
        match event {
            SourceEvent::Connected { incarnation } => {
                debug!(%worker, rank, incarnation, "KV events connected");
                self.disconnect_log.reset();
                self.status.set_connected();
                self.status.update(|report| report.status.connected = true);
                self.meters.connected.set(1);
                self.peer_trees.on_connected();
                self.join_or_wait(now, incarnation, can_replay)
            }
            SourceEvent::Live(batch) => {
                self.note_decode_error(now, &batch);
                if !self.has_room_for(&batch) {
                    return Steps::new();
                }
                self.stream.on_live(now, batch)
            }
            SourceEvent::Replayed(batch) => {
                self.note_decode_error(now, &batch);
                self.stream.on_replayed(now, batch)
            }
            SourceEvent::ReplayEnd => {
                self.note_replay(now, None);
                self.stream.on_replay_end(now)
            }
            SourceEvent::ReplayFailed { reason } => {
                self.note_replay(now, Some(reason));
                self.stream.on_replay_failed(now)
            }
            SourceEvent::Disconnected { reason } => {
                if self.disconnect_log.should_log(now, &reason) {
                    warn!(%worker, rank, reason, "KV events are not received; connecting again and again");
                }
                self.status.update(|report| {
                    report.status.connected = false;
                    report.status.disconnect_reason = Some(reason);
                });
                self.meters.connected.set(0);
                self.joining = None;
                self.stream.on_disconnected(now)
            }
        }
    }

    /// Lets other tasks run, and checks the timers, which a source that is always ready would starve. `now` is when the
    /// last input came: while others ran, this task read nothing, so that time is not the engine's silence.
    async fn yield_when_due(&mut self, now: Instant, source: &mut impl Source) {
        self.inputs_this_turn += 1;
        if self.inputs_this_turn < INPUTS_PER_TURN && self.blocks_this_turn < BLOCKS_PER_TURN {
            return;
        }
        self.inputs_this_turn = 0;
        self.blocks_this_turn = 0;
        tokio::task::yield_now().await;
        self.handle(now, Input::Timer, source).await;
    }

    fn check_eviction(&mut self, now: Instant) {
        if self.eviction_checked_at + EVICTION_CHECK_INTERVAL <= now {
            self.eviction_checked_at = now;
            if self.tree.take_evicted() {
                self.stream.on_incomplete();
                self.unreported_since.get_or_insert(now);
            }
        }
    }

    async fn carry_out(&mut self, steps: Steps<Batch>, source: &mut impl Source) {
        // A tree that stops counting does so before the steps that change it ...
        let state = self.stream.state();
        if !state.counts_in_routing() {
            self.set_state(state);
        }
        // Whether the engine cleared its cache, and the tree has all blocks since.
        let mut is_whole = false;
        for step in steps {
            match step {
                Step::Apply {
                    payload,
                    is_live,
                    is_snapshot,
                    ..
                } => {
                    let effect = self.apply(&payload, is_live).await;
                    is_whole = (is_whole || effect.cleared && !is_snapshot)
                        && effect.impact == TreeImpact::None;
                }
                Step::Clear(reason) => {
                    is_whole = false;
                    self.clear(reason);
                }
                Step::RequestReplay { first } => source.replay(first),
                Step::RequestPeerTree => self.fetch_peer_tree(Duration::ZERO),
                Step::TakePeerTree => self.take_peer_tree().await,
            }
        }
        if is_whole {
            self.stream.on_engine_cleared();
        }
        // ... and one that starts to count does so after all of them.
        self.set_state(self.stream.state());
        self.note_origin();
    }

    async fn apply(&mut self, batch: &Batch, is_live: bool) -> BatchEffect {
        let mut effect = BatchEffect::default();
        self.status.entry().record(batch);
        self.tree.apply(batch, &mut effect);
        if effect.cleared {
            self.status.entry().on_cleared(observe::now());
        }
        self.count(batch, is_live, &effect);
        // A replayed clear says nothing about the cache now, and every snapshot begins with one.
        if effect.cleared && is_live {
            (self.on_cache_lost)(self.subject.worker);
        }
        match effect.impact {
            TreeImpact::None => {}
            TreeImpact::Incomplete => self.stream.on_incomplete(),
            TreeImpact::Unknown => {
                self.note_unknown_removal(observe::now(), batch);
                for step in self.stream.on_unknown_removal() {
                    if let Step::Clear(reason) = step {
                        self.clear(reason);
                    }
                }
            }
        }
        self.shrink_pages().await;
        self.blocks_this_turn += effect.stored + effect.removed;
        if self.blocks_this_turn >= BLOCKS_PER_TURN {
            self.blocks_this_turn = 0;
            tokio::task::yield_now().await;
        }
        effect
    }

    /// Gives the memory of removed pages back. Events of other ranks go on meanwhile.
    async fn shrink_pages(&mut self) {
        let pages = self.tree.pages.as_mut();
        let Some(fold) = pages.and_then(|pages| pages.fold.as_mut()) else {
            return;
        };
        let Some(mut page_move) = fold.begin_shrink() else {
            return;
        };
        while fold.shrink_next(&mut page_move, PAGES_PER_TURN) {
            tokio::task::yield_now().await;
        }
    }

    fn clear(&mut self, reason: ResyncReason) {
        self.peer_trees.note_clear(reason, self.trees.as_deref());
        self.tree.clear();
        self.status.entry().on_cleared(observe::now());
        self.meters.resync(reason);
        if reason.suspects_restart() {
            (self.on_cache_lost)(self.subject.worker);
        }
        self.status
            .update(|report| *report.status.resyncs.entry(reason.as_str()).or_default() += 1);
    }

    fn set_state(&mut self, state: State) {
        self.tree.set_visible(state.counts_in_routing());
        self.status
            .entry()
            .set_state(state, self.stream.is_settled());
    }
}

#[cfg(test)]
mod tests;
