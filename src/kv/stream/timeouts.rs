//! What the stream does when nothing comes.

use std::time::Instant;

use super::types::{Steps, SuspectReason};
use super::{EventStream, MAX_FAILED_REPLAYS, Phase, ReplayResponse};

impl<T> EventStream<T> {
    /// When [`EventStream::on_timeout`] has something to do.
    pub fn next_timeout(&self) -> Option<Instant> {
        match self.phase {
            Phase::InitialReplay { request } | Phase::Verifying { request, .. } => {
                Some(request.deadline)
            }
            Phase::AwaitingPeerTree { deadline } => Some(deadline),
            Phase::Live if self.verifies_on_silence() => {
                Some(self.last_input_at + self.settings.verify_interval)
            }
            Phase::Live | Phase::Disconnected { .. } => None,
        }
    }

    fn verifies_on_silence(&self) -> bool {
        let Some(last) = self.last else {
            return self.can_replay;
        };
        // After a snapshot there is no batch that only its process could repeat; a request would transfer
        // the whole snapshot again whenever the engine is idle. The end of the connection shows a restart
        // then. (An incomplete snapshot is requested again for its missing chunks.)
        let can_verify = self.digests.ends_with(last) || self.snapshot.is_some();
        self.can_replay && self.failed_replays < MAX_FAILED_REPLAYS && can_verify
    }

    pub fn on_timeout(&mut self, now: Instant) -> Steps<T> {
        let mut steps = Steps::new();
        if self.next_timeout().is_none_or(|at| now < at) {
            return steps;
        }
        if self.request_rest(now, &mut steps) {
            return steps;
        }
        match self.phase {
            Phase::Disconnected { .. } => {}
            Phase::AwaitingPeerTree { .. } => self.stop_waiting(now, &mut steps),
            Phase::Live if self.last.is_none() => self.start_initial_replay(now, 1, &mut steps),
            Phase::Live => self.verify(now, SuspectReason::Silence, now, &mut steps),
            // It has never answered, so the silence proves nothing.
            Phase::Verifying {
                suspicion: SuspectReason::Silence,
                ..
            } if self.cannot_replay() => {
                self.last_input_at = now;
                self.response = ReplayResponse::default();
                self.finish_replay(now, false, &mut steps);
            }
            Phase::InitialReplay { .. } | Phase::Verifying { .. } => {
                // The silence period starts again, as after a response.
                self.last_input_at = now;
                self.abandon_request(now, &mut steps);
            }
        }
        steps
    }
}
