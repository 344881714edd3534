//! A run that goes on with what another replica wrote, and what the next one would need for that.

use tracing::info;

use super::Runner;
use crate::openai::error::ApiError;
use crate::relay::{self, Resume};
use crate::responses::chat::Written;
use crate::responses::client_request::Resumed;

/// The log does not have all that was written, or not the token ids of all its text.
const NOT_STORED: &str = "not_stored";
/// A reasoning item was sent with a token that cannot be read back.
const ENCRYPTED_REASONING: &str = "encrypted_reasoning";
/// Token ids may take this part of the bound of a log.
const TOKENS_SHARE: u64 = 4;

impl Runner<'_> {
    /// Events of the engine's answer, with the token ids of their text.
    pub(super) fn on_output(&mut self, events: &[u8]) {
        let mut state = self.guard.run.state.lock();
        state.on_events(events);
        let Some(progress) = &self.progress else {
            return;
        };
        let (part, may_go_on) = progress.take();
        let bytes = state.log.token_bytes() + part.len();
        if bytes as u64 > self.responses.background.max_event_log / TOKENS_SHARE {
            // They must not take the room of the events.
            self.progress = None;
            return state.on_tokens(Vec::new(), false);
        }
        state.on_tokens(part, may_go_on);
    }

    /// Sets the run up as if it had written the stored events. `None` if it cannot go on after them.
    pub(super) fn go_on(&mut self) -> Option<Resumed> {
        match self.resumed() {
            Ok(resumed) => Some(resumed),
            Err(reason) => {
                self.on_refused(reason);
                None
            }
        }
    }

    fn resumed(&mut self) -> Result<Resumed, &'static str> {
        let state = self.guard.run.state.lock();
        let log = &state.log;
        let parts = log.tokens().ok_or(NOT_STORED)?;
        let tokens = Resume::read(parts)?;
        let stored = log.stored_text().ok_or(NOT_STORED)?;
        if self.encoder.signs() {
            return Err(ENCRYPTED_REASONING);
        }
        let written = Written::read(stored).ok_or(NOT_STORED)?;
        let times = tokens.times() + 1;
        if !self.encoder.go_on_after(stored, log.stored(), times) {
            return Err(NOT_STORED);
        }
        if let Some(progress) = &self.progress {
            progress.resume(&tokens);
        }
        Ok(Resumed { tokens, written })
    }

    /// An engine goes on, or none could.
    pub(super) fn on_resumed(&self, resumed: &Resumed, error: Option<&ApiError>) {
        let metrics = &self.responses.background.metrics;
        match error {
            None => {
                info!(
                    response_id = %self.guard.key.id,
                    answer_tokens = resumed.tokens.answer_tokens(),
                    times = resumed.tokens.times() + 1,
                    "a worker goes on with the answer that another replica was lost with"
                );
                metrics.on_continuation("continued", "none");
            }
            Some(error) => match relay::continuation_refusal(error.code) {
                Some(reason) => self.on_refused(reason),
                None => metrics.on_continuation("failed", "none"),
            },
        }
    }

    fn on_refused(&self, reason: &'static str) {
        info!(response_id = %self.guard.key.id, reason, "answer of a lost replica cannot be continued; the response fails");
        let metrics = &self.responses.background.metrics;
        metrics.on_continuation("refused", reason);
    }
}
