//! Inputs that answer a replay request: whether they are of the same process, and what follows from that.

use std::time::Instant;

use super::digests::DigestMatch;
use super::types::{ResyncReason, StateReason, Steps};
use super::{EventStream, MAX_ATTEMPTS, Phase, ReplayRequest, follows};
use crate::kv::source::SourceBatch;

impl<T> EventStream<T> {
    pub fn on_replayed(&mut self, now: Instant, frame: SourceBatch<T>) -> Steps<T> {
        let mut steps = Steps::new();
        self.last_input_at = now;
        self.extend_deadline(now);
        if matches!(self.phase, Phase::Disconnected { .. }) {
            self.counts.unexpected_batches += 1;
            return steps;
        }
        self.on_response();
        self.response.batches += 1;
        let live_digest = match self.regressed {
            Some((sequence, digest)) if sequence == frame.sequence => Some(digest),
            _ => self.buffer.digest(frame.sequence),
        };
        if frame.snapshot.is_none() && live_digest.is_some_and(|digest| digest != frame.digest) {
            self.on_identity_conflict(now, &mut steps);
            return steps;
        }
        // The live batches that wait go on from here, so whatever else the response has is not needed.
        let meets_live = frame.snapshot.is_none() && self.buffer.digest(frame.sequence).is_some();
        if let Some(chunk) = frame.snapshot {
            if chunk.index == 0 {
                self.await_replay_end();
                self.response.is_same_process = true;
            }
            self.accept(frame, false, &mut steps);
            return steps;
        }
        let Some(last) = self.last else {
            if matches!(self.phase, Phase::Live | Phase::AwaitingPeerTree { .. }) {
                // The request was abandoned, but a late replay is better than none.
                let request = ReplayRequest {
                    deadline: now + self.timeout(),
                    attempts: MAX_ATTEMPTS,
                };
                self.phase = Phase::InitialReplay { request };
            }
            self.response.is_same_process = true;
            self.accept(frame, false, &mut steps);
            self.end_if(meets_live, now, &mut steps);
            return steps;
        };
        let has_anchor = self.digests.ends_with(last);
        if frame.sequence <= last && has_anchor {
            match self.digests.compare(frame.sequence, frame.digest) {
                DigestMatch::Same => self.response.is_same_process = true,
                DigestMatch::Different => self.on_other_process(now, &mut steps),
                // Older than all remembered digests, so it was not requested.
                DigestMatch::Unknown => {}
            }
        } else if self.response.is_same_process {
            if !follows(last, frame.sequence) {
                if matches!(self.phase, Phase::Live) {
                    // The rest of a response that is not needed any more.
                    self.counts.unexpected_batches += 1;
                    return steps;
                }
                // The engine dropped batches between those that it sent, as vLLM does beyond the 1,000 that
                // its socket queues. It still has them.
                if self.request_rest(now, &mut steps) {
                    return steps;
                }
                self.counts.gaps += 1;
                self.clear(ResyncReason::Gap, &mut steps);
                self.await_replay_end();
            }
            self.accept(frame, false, &mut steps);
            self.end_if(meets_live, now, &mut steps);
        } else {
            match self.phase {
                // A response to an abandoned request; it may be of any process.
                Phase::Live | Phase::AwaitingPeerTree { .. } | Phase::Disconnected { .. } => {
                    self.counts.unexpected_batches += 1
                }
                // The replay begins after the last applied batch: those in between are gone, and the
                // process cannot be verified. But it is all that the engine still has.
                Phase::InitialReplay { .. } | Phase::Verifying { .. } => {
                    let reason = self.resync_reason();
                    self.counts.verifications_failed += 1;
                    self.clear(reason, &mut steps);
                    self.await_replay_end();
                    self.response.is_same_process = true;
                    self.accept(frame, false, &mut steps);
                    self.end_if(meets_live, now, &mut steps);
                }
            }
        }
        steps
    }

    fn end_if(&mut self, meets_live: bool, now: Instant, steps: &mut Steps<T>) {
        if meets_live {
            steps.extend(self.on_replay_end(now));
        }
    }

    pub fn on_replay_end(&mut self, now: Instant) -> Steps<T> {
        let mut steps = Steps::new();
        self.last_input_at = now;
        if !matches!(self.phase, Phase::Disconnected { .. }) {
            self.on_response();
        }
        let response = std::mem::take(&mut self.response);
        let has_more = response.is_same_process && self.last != response.last_at_request;
        match self.phase {
            Phase::Disconnected { .. } | Phase::AwaitingPeerTree { .. } | Phase::Live => {}
            // An earlier replay broke off, and this one does not connect to it.
            Phase::InitialReplay { .. } if self.last.is_some() && !response.is_same_process => {
                self.resync(now, ResyncReason::Unverified, MAX_ATTEMPTS, &mut steps);
            }
            Phase::InitialReplay { .. } => {
                // A server without history replays one batch, its next.
                if response.batches != 1 || self.reason == StateReason::Snapshot {
                    self.failed_replays = 0;
                }
                self.finish_replay(now, has_more, &mut steps);
                self.want_peer_tree(&mut steps);
            }
            Phase::Verifying { .. } if response.is_same_process || self.last.is_none() => {
                self.counts.verifications_passed += 1;
                self.failed_replays = 0;
                self.finish_replay(now, has_more, &mut steps);
                self.want_interrupted_peer_tree(&mut steps);
            }
            // The last applied batch is not among this process's.
            Phase::Verifying { .. } => self.on_other_process(now, &mut steps),
        }
        steps
    }

    pub fn on_replay_failed(&mut self, now: Instant) -> Steps<T> {
        let mut steps = Steps::new();
        self.last_input_at = now;
        if self.made_progress() && self.request_rest(now, &mut steps) {
            return steps;
        }
        if matches!(
            self.phase,
            Phase::InitialReplay { .. } | Phase::Verifying { .. }
        ) {
            self.failed_replays = self.failed_replays.saturating_add(1);
        }
        if matches!(self.phase, Phase::InitialReplay { .. })
            && self.response.last_at_request.is_some()
        {
            // The rest of a broken-off replay was refused: request everything, once.
            self.resync(now, ResyncReason::Unverified, MAX_ATTEMPTS, &mut steps);
        } else {
            self.abandon_request(now, &mut steps);
        }
        steps
    }
}
