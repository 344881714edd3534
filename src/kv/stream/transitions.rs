//! The transitions that the stream's inputs are composed of.

use std::time::Instant;

use super::digests::DigestMatch;
use super::types::{ResyncReason, State, StateReason, Step, Steps, SuspectReason};
use super::{EventStream, MAX_IDENTITY_CONFLICTS, Phase, SnapshotProgress, follows};
use crate::kv::source::{SnapshotChunk, SourceBatch};

impl<T> EventStream<T> {
    /// Handles a live batch while nothing indicates a restart.
    pub(super) fn apply_live(&mut self, now: Instant, frame: SourceBatch<T>, steps: &mut Steps<T>) {
        let Some(last) = self.last else {
            if frame.sequence > 0 && frame.snapshot.is_none() && !self.cannot_replay() {
                // Earlier batches were missed while the connection was being made.
                self.start_initial_replay(now, 1, steps);
            } else {
                self.buffer_batch(frame);
                self.drain_buffer(now, true, steps);
            }
            return;
        };
        if follows(last, frame.sequence) {
            self.accept(frame, true, steps);
            self.drain_buffer(now, true, steps);
        } else if frame.sequence > last {
            self.buffer_batch(frame);
            self.drain_buffer(now, true, steps);
        } else {
            match self.digests.compare(frame.sequence, frame.digest) {
                DigestMatch::Same => self.counts.duplicates += 1,
                DigestMatch::Different if !self.cannot_replay() => {
                    self.on_identity_conflict(now, steps)
                }
                DigestMatch::Different => {
                    self.clear(ResyncReason::EngineRestarted, steps);
                    self.accept(frame, true, steps);
                }
                DigestMatch::Unknown if !self.cannot_replay() => {
                    self.regressed = Some((frame.sequence, frame.digest));
                    self.verify(now, SuspectReason::SequenceRegressed, now, steps);
                }
                // Not applied: it may be an old batch whose blocks were removed since.
                DigestMatch::Unknown => {
                    self.clear(ResyncReason::SequenceRegressed, steps);
                    self.digests.remember(frame.sequence, frame.digest);
                    self.last = Some(frame.sequence);
                }
            }
        }
    }

    /// The replay is complete: continue with the buffered batches.
    pub(super) fn finish_replay(&mut self, now: Instant, may_request: bool, steps: &mut Steps<T>) {
        self.regressed = None;
        // Only now: an unverified connection must not vouch for the next one.
        self.incarnation.clone_from(&self.connected_incarnation);
        self.phase = Phase::Live;
        self.drain_buffer(now, may_request, steps);
    }

    /// Applies buffered batches as long as they are in sequence. At a gap, requests the missing batches if
    /// `may_request`, otherwise clears and continues without them.
    pub(super) fn drain_buffer(
        &mut self,
        now: Instant,
        mut may_request: bool,
        steps: &mut Steps<T>,
    ) {
        while let Some((sequence, digest)) = self
            .buffer
            .first()
            .map(|frame| (frame.sequence, frame.digest))
        {
            let is_chunk = self
                .buffer
                .first()
                .is_some_and(|frame| frame.snapshot.is_some());
            let misses_some = self.last.is_none() && sequence > 0 && !is_chunk;
            if misses_some && self.await_peer_tree(now, steps) {
                return;
            }
            match self.last {
                Some(last) if sequence <= last && !is_chunk => {
                    if self.digests.compare(sequence, digest) == DigestMatch::Different {
                        self.on_identity_conflict(now, steps);
                        return;
                    }
                    self.counts.duplicates += 1;
                    self.buffer.take_first();
                    continue;
                }
                Some(last) if !follows(last, sequence) && !is_chunk => {
                    if let Phase::Verifying { suspicion, .. } = &mut self.phase {
                        // The pending request brings the missing batches too.
                        if *suspicion == SuspectReason::Silence {
                            *suspicion = SuspectReason::Gap;
                            self.counts.gaps += 1;
                        }
                        return;
                    }
                    self.counts.gaps += 1;
                    if may_request && !self.cannot_replay() {
                        self.verify(now, SuspectReason::Gap, now, steps);
                        return;
                    }
                    self.clear(ResyncReason::Gap, steps);
                    may_request = true;
                }
                Some(_) | None => {}
            }
            if let Some(frame) = self.buffer.take_first() {
                self.accept(frame, true, steps);
            }
        }
        // Nothing is missing any more.
        self.phase = Phase::Live;
    }

    /// Applies the next batch, or the first.
    pub(super) fn accept(&mut self, frame: SourceBatch<T>, is_live: bool, steps: &mut Steps<T>) {
        if is_live {
            // A replay must contain this batch, too, to be of the same process.
            self.response.is_same_process = false;
        }
        if let Some(chunk) = frame.snapshot {
            if !self.accept_snapshot_chunk(chunk, frame.sequence, steps) {
                return;
            }
        } else {
            if self.snapshot.take().is_some() {
                self.is_complete = false;
            }
            if self.last.is_none() {
                self.is_complete = frame.sequence == 0;
                self.reason = match (self.is_complete, self.reason) {
                    (true, _) => StateReason::FullReplay,
                    (false, reason @ StateReason::Resync(_)) => reason,
                    (false, _) => StateReason::HistoryTruncated,
                };
            }
            self.digests.remember(frame.sequence, frame.digest);
        }
        self.last = Some(frame.sequence);
        // A snapshot describes the past, even if it arrives as a live message.
        let is_snapshot = frame.snapshot.is_some();
        let is_live = is_live && !is_snapshot;
        match frame.batch {
            Ok(payload) => steps.push(Step::Apply {
                sequence: frame.sequence,
                payload,
                is_live,
                is_snapshot,
            }),
            Err(_) => self.clear_keeping_sequence(ResyncReason::Undecodable, steps),
        }
    }

    /// Accounts for a snapshot chunk. Returns false if it does not continue the current snapshot.
    pub(super) fn accept_snapshot_chunk(
        &mut self,
        chunk: SnapshotChunk,
        sequence: u64,
        steps: &mut Steps<T>,
    ) -> bool {
        let is_complete = chunk.unknown_before == 0;
        let progress = match self.snapshot {
            _ if chunk.index == 0 => {
                self.clear(ResyncReason::Snapshot, steps);
                SnapshotProgress {
                    next: 1,
                    count: chunk.count,
                    is_complete,
                }
            }
            Some(progress)
                if progress.next == chunk.index
                    && progress.count == chunk.count
                    && self.last.is_some_and(|last| follows(last, sequence)) =>
            {
                SnapshotProgress {
                    next: progress.next + 1,
                    count: progress.count,
                    is_complete: progress.is_complete && is_complete,
                }
            }
            Some(progress) if chunk.index < progress.next => {
                self.counts.duplicates += 1;
                return false;
            }
            // Its predecessor is missing; wait for a new snapshot.
            _ => {
                self.clear(ResyncReason::Gap, steps);
                return false;
            }
        };
        // Chunks use sequence numbers of batches, but have other bytes, so their digests are useless.
        self.digests.clear();
        let is_done = progress.next >= progress.count;
        self.is_complete = is_done && progress.is_complete;
        self.reason = if self.is_complete {
            StateReason::Snapshot
        } else {
            StateReason::PartialSnapshot
        };
        self.snapshot = (!is_done).then_some(progress);
        true
    }

    pub(super) fn buffer_batch(&mut self, frame: SourceBatch<T>) {
        if !self.buffer.push(frame) {
            self.counts.dropped_batches += 1;
        }
    }

    /// The response is of another process than the tree.
    pub(super) fn on_other_process(&mut self, now: Instant, steps: &mut Steps<T>) {
        self.counts.verifications_failed += 1;
        let reason = match self.resync_reason() {
            ResyncReason::PeerTree => ResyncReason::PeerTree,
            _ => ResyncReason::EngineRestarted,
        };
        self.resync(now, reason, 1, steps);
    }

    /// Live batches and the replay are of different processes; one of the connections will end soon.
    pub(super) fn on_identity_conflict(&mut self, now: Instant, steps: &mut Steps<T>) {
        self.counts.identity_conflicts += 1;
        self.identity_conflicts += 1;
        if self.identity_conflicts >= MAX_IDENTITY_CONFLICTS {
            self.can_replay = false;
        }
        self.buffer.clear();
        self.resync(now, ResyncReason::EngineRestarted, 1, steps);
    }

    pub(super) fn resync(
        &mut self,
        now: Instant,
        reason: ResyncReason,
        attempts: u32,
        steps: &mut Steps<T>,
    ) {
        self.clear(reason, steps);
        self.start_initial_replay(now, attempts, steps);
    }

    /// Since when the process may have restarted.
    pub(super) fn suspect_since(&self, now: Instant) -> Instant {
        match (self.state(), self.phase) {
            (_, Phase::Disconnected { since }) | (State::Stale { since }, _) => since,
            _ => now,
        }
    }

    pub(super) fn resync_reason(&self) -> ResyncReason {
        match self.phase {
            Phase::Verifying {
                suspicion: SuspectReason::Gap,
                ..
            } => ResyncReason::Gap,
            Phase::Verifying {
                suspicion: SuspectReason::PeerTree,
                ..
            } => ResyncReason::PeerTree,
            Phase::Verifying { .. }
            | Phase::InitialReplay { .. }
            | Phase::AwaitingPeerTree { .. }
            | Phase::Live
            | Phase::Disconnected { .. } => ResyncReason::Unverified,
        }
    }

    /// Clears the tree and the position in the stream.
    pub(super) fn clear(&mut self, reason: ResyncReason, steps: &mut Steps<T>) {
        self.clear_keeping_sequence(reason, steps);
        self.last = None;
        self.snapshot = None;
        self.regressed = None;
        self.digests.clear();
    }

    /// Clears the tree, but keeps the position: the next batch is still next.
    pub(super) fn clear_keeping_sequence(&mut self, reason: ResyncReason, steps: &mut Steps<T>) {
        if self.last.is_some() {
            steps.push(Step::Clear(reason));
        }
        if reason == ResyncReason::PeerTree {
            self.peer_trees.unconfirmed += 1;
        }
        self.is_complete = false;
        if let Some(progress) = &mut self.snapshot {
            progress.is_complete = false;
        }
        self.reason = StateReason::Resync(reason);
    }
}
