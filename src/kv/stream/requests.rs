//! Replay requests: what is asked for, how often, and how long an answer may take.

use std::time::{Duration, Instant};

use super::types::{ResyncReason, Step, Steps, SuspectReason};
use super::{EventStream, MAX_ATTEMPTS, MAX_FAILED_REPLAYS, Phase, ReplayRequest, ReplayResponse};

/// A pause of this part of the replay time-out within a response means that its rest was dropped.
const PAUSE_IN_RESPONSE: u32 = 4;

impl<T> EventStream<T> {
    /// Requests everything that the process keeps, from its first batch on.
    pub(super) fn start_initial_replay(
        &mut self,
        now: Instant,
        attempts: u32,
        steps: &mut Steps<T>,
    ) {
        if !self.can_replay {
            self.finish_replay(now, false, steps);
            return;
        }
        let mut request = ReplayRequest {
            deadline: now,
            attempts: attempts - 1,
        };
        self.send_request(now, &mut request, steps);
        self.phase = Phase::InitialReplay { request };
    }

    pub(super) fn verify(
        &mut self,
        now: Instant,
        suspicion: SuspectReason,
        since: Instant,
        steps: &mut Steps<T>,
    ) {
        let mut request = ReplayRequest {
            deadline: now,
            attempts: 0,
        };
        self.counts.verifications_started += 1;
        self.send_request(now, &mut request, steps);
        self.phase = Phase::Verifying {
            suspicion,
            since,
            request,
        };
    }

    /// Requests a replay from the last applied batch on, so that the response identifies its process, or
    /// from an earlier batch whose number went backwards. Buffered batches are dropped: the response
    /// contains them, unless it is of another process, and then they do not belong to it.
    pub(super) fn send_request(
        &mut self,
        now: Instant,
        request: &mut ReplayRequest,
        steps: &mut Steps<T>,
    ) {
        let known = self.last.filter(|last| self.digests.ends_with(*last));
        let back = self.regressed.map(|(sequence, _)| sequence);
        let first = known.map_or(0, |last| back.map_or(last, |back| last.min(back)));
        self.buffer.clear();
        self.response = ReplayResponse {
            is_same_process: false,
            last_at_request: self.last,
            batches: 0,
        };
        self.counts.replays_requested += 1;
        request.attempts += 1;
        request.deadline = now + self.timeout();
        steps.push(Step::RequestReplay { first });
    }

    /// Whether the pending request brought a batch that was not known before.
    pub(super) fn made_progress(&self) -> bool {
        self.last.is_some() && self.last != self.response.last_at_request
    }

    /// The response to the pending request broke off or lacks batches: requests again from the last
    /// applied batch on. Returns false if the last [`MAX_ATTEMPTS`] requests brought nothing new; a request
    /// that brought something does not count, so that a long history comes in as many responses as it takes.
    pub(super) fn request_rest(&mut self, now: Instant, steps: &mut Steps<T>) -> bool {
        let made_progress = self.made_progress();
        let (Phase::InitialReplay { mut request } | Phase::Verifying { mut request, .. }) =
            self.phase
        else {
            return false;
        };
        let mut waiting = None;
        if made_progress {
            // Of the process that the response is of, or the response shows that they are not.
            waiting = Some(self.buffer.take());
            request.attempts = 0;
            self.counts.replays_continued += 1;
        }
        if request.attempts >= MAX_ATTEMPTS {
            return false;
        }
        self.send_request(now, &mut request, steps);
        if let Some(waiting) = waiting {
            self.buffer = waiting;
        }
        if let Phase::InitialReplay { request: pending }
        | Phase::Verifying {
            request: pending, ..
        } = &mut self.phase
        {
            *pending = request;
        }
        true
    }

    /// The request got no response, or an incomplete one.
    pub(super) fn abandon_request(&mut self, now: Instant, steps: &mut Steps<T>) {
        self.response = ReplayResponse::default();
        self.replay_unavailable = !self.has_replayed;
        match self.phase {
            Phase::Disconnected { .. } | Phase::Live | Phase::AwaitingPeerTree { .. } => {}
            Phase::InitialReplay { .. } => {
                // The missing half of the response may remove blocks of the received half.
                if self.last.is_some() {
                    self.clear(ResyncReason::Unverified, steps);
                }
                self.finish_replay(now, false, steps);
                self.want_peer_tree(steps);
            }
            Phase::Verifying { .. } => {
                self.counts.verifications_failed += 1;
                let reason = self.resync_reason();
                // It did not answer just now, so only one more attempt.
                self.resync(now, reason, MAX_ATTEMPTS, steps);
            }
        }
    }

    /// Nothing of a replay counts until it is complete: later batches remove blocks of earlier ones.
    pub(super) fn await_replay_end(&mut self) {
        if let Phase::Verifying { request, .. } = self.phase {
            self.phase = Phase::InitialReplay { request };
        }
    }

    /// A response that makes progress gets its time-out anew: a shorter one, because an engine sends the
    /// batches of a response without a pause, and asking again keeps those that came.
    pub(super) fn extend_deadline(&mut self, now: Instant) {
        let deadline = if self.made_progress() {
            now + self.timeout() / PAUSE_IN_RESPONSE
        } else {
            now + self.timeout()
        };
        if let Phase::InitialReplay { request } | Phase::Verifying { request, .. } = &mut self.phase
        {
            request.deadline = deadline;
        }
    }

    /// Whether a replay request would be useless.
    pub(super) fn cannot_replay(&self) -> bool {
        !self.can_replay || self.replay_unavailable || self.failed_replays >= MAX_FAILED_REPLAYS
    }

    pub(super) fn on_response(&mut self) {
        self.has_replayed = true;
        self.replay_unavailable = false;
    }

    pub(super) fn timeout(&self) -> Duration {
        self.settings.replay_timeout
    }
}
