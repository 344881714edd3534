//! A run that another response came before in its conversation is generated again, on the history of now.

use std::time::Duration;

use hyper::StatusCode;
use tokio::time::sleep;

use super::Runner;
use super::in_conversation::{PAUSE, resume};
use crate::openai::error::ApiError;
use crate::responses::background::runs::NO_MEMORY;
use crate::responses::background::stored_request::StoredRequest;
use crate::responses::history::{Access, History};
use crate::responses::prepare::input_after;
use crate::store::CommitRefusal;

/// Before memory is asked for again for a history that there was none for. What takes the memory may go on for an hour,
/// so the pause doubles with each try.
const MEMORY_PAUSE: Duration = Duration::from_secs(2);
/// Once there is memory, the run is to go on soon.
const MEMORY_PAUSE_MAX: Duration = Duration::from_secs(30);
/// The store cannot be asked now.
const BUSY: StatusCode = StatusCode::SERVICE_UNAVAILABLE;

impl Runner<'_> {
    /// After a take-over, continues the lock of the conversation. If another response was added to it, since this one
    /// read its history: locks it anew, and returns the request with the history of now.
    pub(super) async fn set_up_conversation(
        &mut self,
        request: &StoredRequest,
    ) -> Option<StoredRequest> {
        let state = &self.guard.run.state;
        if self.finisher.conversation.is_none()
            && !state.lock().has_old_history()
            && let Some((id, token, items)) = request.conversation()
        {
            self.finisher.new_items = items;
            self.finisher.conversation = resume(self.responses, self.guard, id, token).await;
        }
        if !state.lock().has_old_history() {
            return None;
        }
        match self.with_new_history(request).await {
            Ok(anew) => {
                state.lock().on_new_history();
                anew
            }
            Err(error) if error.status == StatusCode::NOT_FOUND => {
                state.lock().on_conversation_lost(CommitRefusal::Gone);
                None
            }
            Err(error) => {
                if !self.encoder.is_announced {
                    state.lock().on_events(&self.encoder.announce());
                }
                let (events, outcome) = self.encoder.fail_refused(&error);
                self.conclude(&events, outcome).await;
                None
            }
        }
    }

    /// What the request takes with this history.
    fn bytes_with(&self, request: &StoredRequest, history: &History) -> u64 {
        let new_items = self.finisher.new_items.iter();
        let new_bytes: usize = new_items.map(|item| item.json.len()).sum();
        let bytes = request.client().len() + history.bytes() + new_bytes;
        bytes as u64
    }

    /// Waits until the conversation is free, and until there is memory for its history. The time limit of the run bounds
    /// that.
    async fn with_new_history(
        &mut self,
        request: &StoredRequest,
    ) -> Result<Option<StoredRequest>, ApiError> {
        let (responses, tenant) = (self.responses, self.guard.key.tenant);
        let id = request.conversation_id().unwrap_or_default();
        // What the request takes with the history, once that was read and there was no memory for it.
        let mut lacking = None;
        let mut pause = MEMORY_PAUSE;
        let mut history = loop {
            if let Some(bytes) = lacking
                && !self.memory.try_renew(bytes)
            {
                sleep(pause).await;
                pause = longer(pause);
                continue;
            }
            let mut history = match responses.conversation(id, tenant, Access::Exclusive).await {
                Err(error) if error.is_locked_conversation() || error.status == BUSY => {
                    sleep(PAUSE).await;
                    continue;
                }
                read => read?,
            };
            let bytes = self.bytes_with(request, &history);
            if self.memory.try_renew(bytes) {
                break history;
            }
            // Other responses of the conversation do not wait for the memory of this one.
            if let Some(lock) = history.take_lock() {
                lock.release().await;
            }
            if lacking.replace(bytes).is_none() {
                responses.background.count_refusal(NO_MEMORY);
            }
        };
        // Its token differs from the one in the record, so a replica that takes over reads the history anew, too.
        self.finisher.conversation = history.take_lock();
        let new_items = &self.finisher.new_items;
        let input = input_after(&history, new_items)?;
        if let Some(state) = &mut self.finisher.client_state {
            state.lists = history.lists;
            state.lists.extend(
                new_items
                    .iter()
                    .map(|item| [b"[", &*item.json, b"]"].concat().into()),
            );
        }
        Ok(request.with_input(input))
    }
}

fn longer(pause: Duration) -> Duration {
    (pause * 2).min(MEMORY_PAUSE_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_without_memory_asks_for_it_ever_more_rarely() {
        let pauses = std::iter::successors(Some(MEMORY_PAUSE), |pause| Some(longer(*pause)));
        let seconds: Vec<u64> = pauses.take(6).map(|pause| pause.as_secs()).collect();
        assert_eq!(seconds, [2, 4, 8, 16, 30, 30]);
    }
}
