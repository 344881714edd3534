//! The state machine for one rank's batches: which may be applied, and whether the tree may be trusted.
//!
//! Sequence numbers alone do not show that an engine restarted. So whenever that is possible, the machine
//! verifies the process: it requests a replay from the last batch it applied, which only the process that
//! published it can repeat byte for byte. Every replay request, also one that fills a gap, begins with
//! that batch, so batches of another process are never applied on top of this one's.
//!
//! Pure: no clock, no I/O, and it does not look into the batches.

mod buffer;
mod digests;
mod peer_tree;
mod replay;
mod requests;
mod timeouts;
mod transitions;
mod types;

use std::time::{Duration, Instant};

use super::source::SourceBatch;
use buffer::ReorderBuffer;
use digests::DigestWindow;
pub use types::{
    Counts, PeerTree, PeerTreeRefusal, ResyncReason, Settings, State, StateReason, Step, Steps,
    SuspectReason,
};

/// A replay request is sent at most this often without a response that brings new batches; then the tree is
/// cleared.
const MAX_ATTEMPTS: u32 = 2;
/// How often live batches and replays of one connection may be of different processes (the last batches of
/// a dying process cause that) before its replays are ignored.
const MAX_IDENTITY_CONFLICTS: u32 = 3;
/// After this many failed replays in a row the source evidently keeps no history, and requests only disturb
/// the engine.
const MAX_FAILED_REPLAYS: u32 = 2;

#[derive(Debug)]
pub struct EventStream<T> {
    settings: Settings,
    phase: Phase,
    /// Sequence number of the last batch applied; `None` after a clear.
    last: Option<u64>,
    /// Whether all blocks that the process caches are known.
    is_complete: bool,
    reason: StateReason,
    digests: DigestWindow,
    buffer: ReorderBuffer<T>,
    /// A snapshot of which some chunks are still missing.
    snapshot: Option<SnapshotProgress>,
    response: ReplayResponse,
    /// Whether this connection's source can replay.
    can_replay: bool,
    /// A request on this connection timed out, and none was ever answered.
    replay_unavailable: bool,
    has_replayed: bool,
    identity_conflicts: u32,
    failed_replays: u32,
    /// Sequence number and digest of a live batch whose number went backwards.
    regressed: Option<(u64, u128)>,
    /// The process that the tree belongs to, if the source names it.
    incarnation: Option<String>,
    /// The process at the other end of this connection.
    connected_incarnation: Option<String>,
    last_input_at: Instant,
    peer_trees: PeerTrees,
    counts: Counts,
}

/// Whether other replicas are asked for their trees.
#[derive(Clone, Copy, Debug, Default)]
struct PeerTrees {
    /// How long batches wait for one; `None` if there are no other replicas.
    timeout: Option<Duration>,
    is_requested: bool,
    /// The connection was lost while a tree was requested, or before the first replay showed whether one is needed:
    /// once the process is verified, one is requested again.
    was_interrupted: bool,
    /// Trees that the engine did not confirm on this connection.
    unconfirmed: u32,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    Disconnected {
        since: Instant,
    },
    /// All batches that the engine keeps were requested. Nothing counts until the replay is complete.
    InitialReplay {
        request: ReplayRequest,
    },
    /// Batches are applied as they come.
    Live,
    /// The engine cannot replay what came before its first live batch, so batches wait for another replica's
    /// tree: one that a waiting batch confirms.
    AwaitingPeerTree {
        deadline: Instant,
    },
    /// The last applied batch and all after it were requested, to verify the process or to fill a gap.
    Verifying {
        suspicion: SuspectReason,
        since: Instant,
        request: ReplayRequest,
    },
}

#[derive(Clone, Copy, Debug)]
struct ReplayRequest {
    deadline: Instant,
    /// How often it was sent since it last brought new batches.
    attempts: u32,
}

/// What is known of the replay being received.
#[derive(Clone, Copy, Debug, Default)]
struct ReplayResponse {
    /// It contained the last applied batch unchanged, so it is of the process that the tree belongs to.
    is_same_process: bool,
    /// The stream's `last` when the replay was requested.
    last_at_request: Option<u64>,
    batches: u64,
}

#[derive(Clone, Copy, Debug)]
struct SnapshotProgress {
    next: u32,
    count: u32,
    is_complete: bool,
}

impl<T> EventStream<T> {
    pub fn new(settings: Settings, now: Instant) -> Self {
        let buffer = ReorderBuffer::new(&settings);
        Self {
            settings,
            phase: Phase::Disconnected { since: now },
            last: None,
            is_complete: false,
            reason: StateReason::Starting,
            digests: DigestWindow::new(digests::MAX_DIGESTS),
            buffer,
            snapshot: None,
            response: ReplayResponse::default(),
            can_replay: false,
            replay_unavailable: false,
            has_replayed: false,
            identity_conflicts: 0,
            failed_replays: 0,
            regressed: None,
            incarnation: None,
            connected_incarnation: None,
            last_input_at: now,
            peer_trees: PeerTrees::default(),
            counts: Counts::default(),
        }
    }

    /// Asks other replicas for what the engine does not replay. Batches that cannot be replayed wait for an answer for
    /// up to `timeout`.
    #[must_use]
    pub fn with_peer_trees(mut self, timeout: Duration) -> Self {
        self.peer_trees.timeout = Some(timeout);
        self
    }

    pub fn state(&self) -> State {
        match self.phase {
            _ if self.last.is_none() => State::Cold,
            Phase::Disconnected { since } => State::Stale { since },
            Phase::InitialReplay { .. } | Phase::AwaitingPeerTree { .. } => State::Cold,
            Phase::Verifying {
                suspicion,
                since,
                request,
            } if suspicion.suspects_restart()
                // The process is the same, but the blocks it removed meanwhile are not known yet.
                || suspicion == SuspectReason::SameIncarnation
                || request.attempts > 1 && !self.cannot_replay() =>
            {
                State::Stale { since }
            }
            Phase::Live | Phase::Verifying { .. } => {
                if self.is_complete && self.snapshot.is_none() {
                    State::Live
                } else {
                    State::Partial
                }
            }
        }
    }

    /// Whether the first replay, which shows what the process caches, is not complete yet.
    pub fn is_initial_replay(&self) -> bool {
        matches!(self.phase, Phase::InitialReplay { .. })
    }

    /// Whether no more is to be known soon than is known now: no request for what the process caches is under way, and
    /// none that a lost connection interrupted waits for the next connection.
    pub fn is_settled(&self) -> bool {
        let is_asking = match self.phase {
            Phase::InitialReplay { .. } | Phase::AwaitingPeerTree { .. } => true,
            Phase::Verifying { suspicion, .. } => {
                suspicion.suspects_restart() || self.peer_trees.was_interrupted
            }
            Phase::Disconnected { .. } => self.peer_trees.was_interrupted,
            Phase::Live => false,
        };
        !is_asking && !self.peer_trees.is_requested
    }

    pub fn reason(&self) -> StateReason {
        match (self.state(), self.phase) {
            (State::Stale { .. }, Phase::Verifying { suspicion, .. }) => {
                StateReason::Suspect(suspicion)
            }
            (State::Stale { .. }, _) => StateReason::Disconnected,
            _ => self.reason,
        }
    }

    pub fn last_sequence(&self) -> Option<u64> {
        self.last
    }

    pub fn incarnation(&self) -> Option<&str> {
        self.incarnation.as_deref()
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Buffered batches, and their bytes.
    pub fn buffered(&self) -> (usize, usize) {
        (self.buffer.len(), self.buffer.bytes())
    }

    /// A connection was made. `can_replay`: its source can replay.
    pub fn on_connected(
        &mut self,
        now: Instant,
        incarnation: Option<&str>,
        can_replay: bool,
    ) -> Steps<T> {
        let mut steps = Steps::new();
        if !matches!(self.phase, Phase::Disconnected { .. }) {
            // The source did not report the end of the previous connection.
            steps.extend(self.on_disconnected(now));
        }
        let since = self.suspect_since(now);
        let same_incarnation = self
            .incarnation
            .as_deref()
            .zip(incarnation)
            .map(|(before, now)| before == now);
        self.connected_incarnation = incarnation.map(str::to_owned);
        self.can_replay = can_replay;
        self.replay_unavailable = false;
        self.has_replayed = false;
        self.identity_conflicts = 0;
        self.peer_trees.unconfirmed = 0;
        self.last_input_at = now;
        match (self.last, same_incarnation) {
            (None, _) => self.start_initial_replay(now, 1, &mut steps),
            (Some(_), _) if !can_replay => {
                self.clear(ResyncReason::Disconnected, &mut steps);
                self.finish_replay(now, false, &mut steps);
            }
            (Some(_), Some(false)) => {
                self.resync(now, ResyncReason::EngineRestarted, 1, &mut steps)
            }
            (Some(_), Some(true)) => {
                self.verify(now, SuspectReason::SameIncarnation, since, &mut steps)
            }
            (Some(_), None) => self.verify(now, SuspectReason::Reconnected, since, &mut steps),
        }
        steps
    }

    pub fn on_disconnected(&mut self, now: Instant) -> Steps<T> {
        let mut steps = Steps::new();
        self.peer_trees.was_interrupted |= self.peer_trees.is_requested;
        if matches!(self.phase, Phase::InitialReplay { .. }) {
            self.peer_trees.was_interrupted = true;
            // The missing half of the replay may remove blocks of the received half, so the same
            // incarnation id would not be enough to trust it.
            self.incarnation = None;
        }
        let since = self.suspect_since(now);
        self.phase = Phase::Disconnected { since };
        // Buffered batches cannot be distinguished from another process's any more.
        self.buffer.clear();
        self.regressed = None;
        self.response = ReplayResponse::default();
        if self.snapshot.take().is_some() {
            self.is_complete = false;
        }
        if !self.can_replay && self.last.is_some() {
            self.clear(ResyncReason::Disconnected, &mut steps);
        }
        if self.last.is_none() {
            self.reason = StateReason::Disconnected;
        }
        steps
    }

    /// The health checks saw the worker go down or its process start: the tree may belong to a process that
    /// is gone, even if the connection still stands.
    pub fn on_restart_signal(&mut self, now: Instant) -> Steps<T> {
        let mut steps = Steps::new();
        if self.last.is_some() {
            // An intermediate server may not have noticed yet. Its name for the process counts again when the process
            // has repeated the last batch.
            self.incarnation = None;
        }
        match self.phase {
            // The next connection verifies anyway.
            Phase::Disconnected { .. } => {}
            Phase::InitialReplay { .. } if self.last.is_none() => {
                self.start_initial_replay(now, 1, &mut steps);
            }
            // What waits may be the old process's.
            Phase::AwaitingPeerTree { .. } => {
                self.buffer.clear();
                self.phase = Phase::Live;
            }
            _ if self.last.is_none() => {}
            Phase::InitialReplay { .. } | Phase::Live | Phase::Verifying { .. }
                if self.can_replay =>
            {
                let since = self.suspect_since(now);
                self.verify(now, SuspectReason::RestartSignal, since, &mut steps);
            }
            Phase::InitialReplay { .. } | Phase::Live | Phase::Verifying { .. } => {
                self.clear_keeping_sequence(ResyncReason::RestartSignal, &mut steps);
            }
        }
        steps
    }

    pub fn on_live(&mut self, now: Instant, frame: SourceBatch<T>) -> Steps<T> {
        let mut steps = Steps::new();
        self.last_input_at = now;
        let was_live = matches!(self.phase, Phase::Live);
        // A snapshot is of this connection's process and needs nothing before it.
        let begins_snapshot = frame.snapshot.is_some_and(|chunk| chunk.index == 0);
        match self.phase {
            Phase::Disconnected { .. } => self.counts.unexpected_batches += 1,
            _ if begins_snapshot => {
                self.buffer.clear();
                self.response = ReplayResponse::default();
                self.finish_replay(now, false, &mut steps);
                self.accept(frame, true, &mut steps);
            }
            Phase::InitialReplay { .. } | Phase::AwaitingPeerTree { .. } => {
                self.buffer_batch(frame)
            }
            Phase::Verifying { suspicion, .. } if suspicion.suspects_restart() => {
                self.buffer_batch(frame)
            }
            Phase::Live | Phase::Verifying { .. } => self.apply_live(now, frame, &mut steps),
        }
        if !was_live && matches!(self.phase, Phase::Live) {
            // The replay that was waited for may fail yet. A tree is not taken without another verification.
            self.want_interrupted_peer_tree(&mut steps);
        }
        steps
    }

    /// Unknown blocks were removed, so none of the known ones can be trusted.
    pub fn on_unknown_removal(&mut self) -> Steps<T> {
        let mut steps = Steps::new();
        self.clear_keeping_sequence(ResyncReason::UnknownRemoval, &mut steps);
        steps
    }

    /// A batch applied just now cleared the engine's whole cache, and nothing was left out since: what was missing
    /// before is not cached any more.
    pub fn on_engine_cleared(&mut self) {
        if self.last.is_some() && !self.is_complete && self.snapshot.is_none() {
            self.is_complete = true;
            self.reason = StateReason::EngineCleared;
        }
    }

    /// The tree misses some cached blocks: they could not be added, or were evicted from the index.
    pub fn on_incomplete(&mut self) {
        if let Some(progress) = &mut self.snapshot {
            progress.is_complete = false;
        }
        if self.is_complete {
            self.is_complete = false;
            self.reason = StateReason::Incomplete;
        }
    }
}

fn follows(last: u64, sequence: u64) -> bool {
    sequence.checked_sub(last) == Some(1)
}

#[cfg(test)]
mod tests;
